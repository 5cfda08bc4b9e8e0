# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured: every row of a training, with the error, and whether it was right that it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from liger_bench.plan.advice import Predict
from liger_bench.plan.step import forward_and_backward, predict
from liger_bench.results import read_json
from liger_bench.train.setup import Setup
from liger_core.errors import OptionError
from liger_hf.presets import preset_name

RESULTS = "train.json"
# What `liger bench model` compiles, and peers, are not predicted.
LIGER = {"hf": "none", "liger": "all"}
# Errors of a prediction beyond which a comparison has failed.
ALLOWED = 0.1


@dataclass(frozen=True)
class Compared:
    """predicted_bytes and measured_bytes are peaks of a rank; none was measured where memory ran out."""

    setup: Setup
    predicted_bytes: int
    measured_bytes: int | None
    reserved_bytes: int | None
    predicted_to_fit: bool | None
    fitted: bool

    @property
    def error(self) -> float | None:
        return None if not self.measured_bytes else self.predicted_bytes / self.measured_bytes - 1

    @property
    def right(self) -> bool:
        """Whether it fits was foreseen; nothing was where no limit is known."""
        return self.predicted_to_fit is None or self.predicted_to_fit == self.fitted

    @property
    def good(self) -> bool:
        return self.right and (self.error is None or abs(self.error) <= ALLOWED)

    def columns(self) -> dict[str, Any]:
        return {
            "setup": self.setup.command(),
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "reserved_bytes": self.reserved_bytes,
            "error": self.error,
            "predicted_to_fit": self.predicted_to_fit,
            "fitted": self.fitted,
        }


def rows_in(results: Path) -> list[dict[str, Any]]:
    """The rows of a file, or of train.json in a folder, of which a peak can be predicted: not those that take what memory there is.

    Raises OptionError if there are none.
    """
    path = results / RESULTS if results.is_dir() else results
    rows = [row for row in read_json(path) if row.get("peak_bytes") or row.get("out_of_memory")]
    rows = [row for row in rows if row.get("checkpoint") != "auto" and row.get("implementation", "hf") in LIGER]
    if not rows:
        raise OptionError(f"plan: --compare must name rows of `liger train` or `liger bench model`, {path} has none")
    return rows


def compared(rows: Sequence[dict[str, Any]], foresee: Predict = predict, *, trust_remote_code: bool = False) -> Iterator[Compared]:
    """Each row beside its prediction. Whether code of a model may run is not for the row alone to say."""
    for row in rows:
        setup = _benchmarked(row) if "implementation" in row else _trained(row)
        setup = replace(setup, trust_remote_code=setup.trust_remote_code and trust_remote_code)
        predicted = forward_and_backward(setup) if "implementation" in row else foresee(setup).peak_bytes
        fitted = not row["out_of_memory"]
        # Unless it was a cap, how much there was is not in a row.
        foreseen = None if setup.memory_limit is None else predicted <= setup.memory_limit
        measured = row["peak_bytes"] if fitted else None
        yield Compared(setup, predicted, measured, row.get("peak_reserved_bytes") if fitted else None, foreseen, fitted)


def _trained(row: dict[str, Any]) -> Setup:
    return Setup(**{field.name: row[field.name] for field in fields(Setup) if field.name in row})


def _benchmarked(row: dict[str, Any]) -> Setup:
    """`liger bench model` checkpoints every layer, and its weights are in the dtype that it computes in."""
    precision = "fp32" if row["dtype"] == "float32" else "bf16-pure"
    return Setup(
        preset_name(row["model"]),
        row["batch"],
        row["sequence"],
        liger=LIGER[row["implementation"]],
        precision=precision,
        device=row["device"],
        memory_limit=row["memory_limit_bytes"],
    )
