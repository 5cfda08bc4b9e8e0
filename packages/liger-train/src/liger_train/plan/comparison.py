# SPDX-License-Identifier: Apache-2.0
"""Compare predicted and measured memory: the error for every row, and whether the prediction of a fit was right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from liger_bench.results import read_json
from liger_core.errors import OptionError
from liger_hf.presets import preset_name
from liger_train.implementations import PEER
from liger_train.plan.auto_checkpoint import predict_end
from liger_train.plan.step import forward_and_backward, predict
from liger_train.row import setup_from
from liger_train.setup import Setup

RESULTS = "train.json"
# Implementation in rows of earlier versions → value of --liger; others are not predicted.
LIGER = {"hf": "none", "liger": "all"}
# The allowed relative error.
ALLOWED = 0.1


@dataclass(frozen=True)
class Compared:
    """The predicted and measured peak memory of a rank; measured_bytes is None if the run ran out of memory."""

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
        """Whether the prediction of a fit was right; True if no limit is known."""
        return self.predicted_to_fit is None or self.predicted_to_fit == self.fitted

    @property
    def good(self) -> bool:
        return self.right and (self.error is None or abs(self.error) <= ALLOWED)

    def columns(self) -> dict[str, Any]:
        return vars(self) | {"setup": self.setup.command(), "error": self.error}


def rows_in(results: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, or of train.json in a folder, whose peak can be predicted.

    --checkpoint auto without a limit and other libraries cannot be predicted.

    Raises OptionError if there are none.
    """
    path = results / RESULTS if results.is_dir() else results
    rows = [row for row in read_json(path) if row.get("peak_bytes") or row.get("out_of_memory")]
    rows = [row for row in rows if row.get("checkpoint") != "auto" or row.get("memory_limit")]
    rows = [row for row in rows if row.get("liger") != PEER]
    rows = [row for row in rows if row.get("implementation", "hf") in LIGER]
    if not rows:
        raise OptionError(f"plan: --compare must name results of `liger train`, but no row of {path} can be predicted")
    return rows


def compare_rows(rows: Sequence[dict[str, Any]], *, trust_remote_code: bool = False) -> Iterator[Compared]:
    """Yield each row with its prediction; a model's own code runs only if both the row and the caller trust it."""
    for row in rows:
        if "implementation" in row:
            setup = _setup_of_benchmark(row)
            predicted = forward_and_backward(setup)
        else:
            setup = setup_from(row)
            setup = replace(setup, trust_remote_code=setup.trust_remote_code and trust_remote_code)
            predicted = predict_end(predict(setup), setup.memory_limit).peak_bytes
        fitted = not row["out_of_memory"]
        # Without a limit, a row does not say how much memory the device has.
        predicted_to_fit = None if setup.memory_limit is None else predicted <= setup.memory_limit
        measured = row["peak_bytes"] if fitted else None
        reserved = row.get("peak_reserved_bytes") if fitted else None
        yield Compared(setup, predicted, measured, reserved, predicted_to_fit, fitted)


def _setup_of_benchmark(row: dict[str, Any]) -> Setup:
    """Return the setup of a row in an earlier version's model.json, whose weights had the dtype of matmuls."""
    return Setup(
        preset_name(row["model"]),
        row["batch"],
        row["sequence"],
        liger=LIGER[row["implementation"]],
        precision="fp32" if row["dtype"] == "float32" else "bf16-pure",
        device=row["device"],
        memory_limit=row["memory_limit_bytes"],
    )
