# SPDX-License-Identifier: Apache-2.0
"""The rows of a benchmark: taken, and appended to files that grow from run to run."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from liger_bench import machine
from liger_bench.bench.case import Case
from liger_bench.bench.limits import Limits
from liger_bench.bench.timing import time_call
from liger_bench.memory import peak_bytes
from liger_core.errors import BackendError, OptionError, Unsupported
from liger_core.selection import use


@dataclass(frozen=True)
class Row:
    """One pass of one implementation on one workload, with where and how it was measured.

    op, workload    what was called; `axis` and `axis_value` name the one size that a scaling workload varies, for instance N and 4096
    implementation  a backend or a peer, which `kind` tells apart ("backend", "peer"); the backend `reference` is pure PyTorch
    pass_           forward (inputs require gradients), backward, full (both), evaluation (no gradients, only for ops whose forward pass
                    may do the work of the backward one); dispatch is what choosing an implementation costs a call
    median_ms …     over `repetitions` calls taken in turns with the other implementations; low and high are the 0.2 and 0.8 quantiles
    enqueue_ms      what the host takes until the call is on its way; None on a CPU, but for dispatch
    graph_ms        median of replaying the same call as a CUDA graph; `graph_reason` says why there is none
    limit_ms        least time by the limits of this run: bytes at copy bandwidth, operations at the rate of a large product, or the
                    measured time of the very products that the call cannot avoid. None for the backward pass, whose least work
                    depends on what the forward pass left to do
    share           limit_ms over median_ms; may pass 1 where the data fits a cache
    peak_extra_bytes  beyond inputs (and, for the backward pass, what the forward pass kept); results count
    peak_beyond_gradients_bytes  the same without the gradients that the call returned
    error_*         largest relative error among outputs and among gradients against the reference in float64
    error_eager_ratio  largest ratio, among gradients, of that error to the error of plain eager PyTorch in the same dtype
    reason          why there are no figures, else empty; `failed` if that is a defect and not a limit of the implementation
    """

    op: str
    workload: str
    axis: str | None
    axis_value: int | None
    implementation: str
    kind: str
    pass_: str
    device: str
    dtype: str
    median_ms: float | None
    low_ms: float | None
    high_ms: float | None
    repetitions: int | None
    enqueue_ms: float | None
    graph_ms: float | None
    graph_reason: str
    limit_ms: float | None
    share: float | None
    peak_extra_bytes: int | None
    peak_beyond_gradients_bytes: int | None
    error_outputs: float | None
    error_gradients: float | None
    error_eager_ratio: float | None
    reason: str
    failed: bool
    copy_bytes_per_second: float
    product_flops_per_second: float
    machine: str
    versions: str
    commit: str
    date: str

    def columns(self) -> dict[str, Any]:
        return {name.rstrip("_"): value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Bench:
    """What is the same for all rows of a run."""

    device: torch.device
    dtype: torch.dtype
    limits: Limits
    seconds: float
    where: dict[str, str]

    def rows(self, case: Case, implementation: str) -> list[Row]:
        """Measure the three passes; one row with the reason if the implementation declines the call or fails."""
        try:
            with use(implementation, only=[case.op]):
                errors = case.errors(case.full())
                taken = [self._measured(case, implementation, name, errors) for name in ("forward", "backward", "full")]
            return taken
        except BackendError as error:
            return [self._row(case, implementation, "", reason=str(error), failed=not isinstance(error.__cause__, Unsupported))]
        except torch.OutOfMemoryError as error:
            return [self._row(case, implementation, "", reason=f"out of memory: {error}".splitlines()[0])]
        except Exception as error:
            return [self._row(case, implementation, "", reason=f"{type(error).__name__}: {error}".splitlines()[0], failed=True)]

    def _measured(self, case: Case, implementation: str, name: str, errors: dict[str, float]) -> Row:
        calls: dict[str, Callable[[], Callable[[], object]]] = {
            "forward": lambda: case.forward,
            "backward": case.backward,
            "full": lambda: case.full,
        }
        call = calls[name]()
        timing = time_call(call, self.device, self.seconds)
        least = self.limits.least_seconds(case.work()).get(name)
        return self._row(
            case,
            implementation,
            name,
            median_ms=timing.median_ms,
            low_ms=timing.low_ms,
            high_ms=timing.high_ms,
            enqueue_ms=timing.enqueue_ms,
            repetitions=timing.repetitions,
            peak_extra_bytes=peak_bytes(call, self.device),
            limit_ms=None if least is None else least * 1e3,
            share=None if least is None else least / (timing.median_ms / 1e3),
            error_outputs=errors.get("outputs"),
            error_gradients=errors.get("gradients"),
        )

    def _row(self, case: Case, implementation: str, name: str, **measured: Any) -> Row:
        empty: dict[str, Any] = {field.name: None for field in fields(Row)} | {
            "kind": "backend",
            "graph_reason": "",
            "reason": "",
            "failed": False,
        }
        known = {
            "op": case.op.name,
            "workload": case.workload,
            "implementation": implementation,
            "pass_": name,
            "device": self.device.type,
            "dtype": machine.dtype_name(self.dtype),
            "copy_bytes_per_second": self.limits.bandwidth,
            "product_flops_per_second": self.limits.rate,
        }
        return Row(**(empty | known | self.where | measured))


def append_csv(rows: list[Row], path: Path) -> None:
    """Add the rows to a file, which gets its header when it is new.

    Raises OptionError if the file has other columns, since its rows would then mean something else.
    """
    header = [field.name.rstrip("_") for field in fields(Row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    check_csv(path)
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, header)
        if new:
            writer.writeheader()
        writer.writerows(row.columns() for row in rows)


def check_csv(path: Path) -> None:
    """Raise OptionError if rows cannot be appended there."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open(newline="") as file:
        found = next(csv.reader(file))
    header = [field.name.rstrip("_") for field in fields(Row)]
    if found != header:
        raise OptionError(
            f"bench: {path} must have the columns of this version to be appended to, got {','.join(found)[:200]}; give another file"
        )


def append_json(rows: list[Row], path: Path) -> None:
    """Add the rows to the list in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else []
    written = path.with_suffix(".part")
    written.write_text(json.dumps([*before, *(row.columns() for row in rows)], indent=1) + "\n")
    # Only a complete file takes the place of the old one.
    written.replace(path)
