# SPDX-License-Identifier: Apache-2.0
"""Run many comparisons, one after the other: models by setups, with and without Liger."""

import math
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, get_type_hints

from liger_core.errors import OptionError, nearest
from liger_verify.comparison import check, compare_with_truth, leave_truth
from liger_verify.forms import Packing
from liger_verify.packing import PackingReport
from liger_verify.report import Report
from liger_verify.training import Training

# The models and setups of `--matrix`: every dimension alone, and combinations that affect the same gradient.
MODELS = ("llama", "qwen3", "gemma2", "granite", "phi3", "mixtral")
SETUPS: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"cp": 2},
    {"tp": 2, "cp": 2},
    {"tp": 2, "ranks": 4, "accumulation": 3},
    {"cp": 2, "ranks": 4, "accumulation": 3},
    {"shard": "ddp", "ranks": 4, "accumulation": 2},
    {"shard": "fsdp2", "ranks": 4, "accumulation": 2},
    {"shard": "none", "cp": 2, "ranks": 4},
    {"tp": 2, "cp": 2, "ranks": 8, "accumulation": 3},
)
# The fields of a setup in a file, and their types.
FIELDS: dict[str, type] = {name: kind for name, kind in get_type_hints(Training).items() if kind in (str, int, bool)}
LEAST = {"sequence": 8, "seed": 0, "ranks": 2}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one comparison in a matrix: a report, or the problem that prevented it."""

    training: Training | Packing
    seconds: float
    report: Report | PackingReport | None = None
    problem: str = ""

    @property
    def right(self) -> bool:
        return self.report is not None and self.report.right

    @property
    def error(self) -> float:
        """The largest relative error of a gradient."""
        return math.nan if self.report is None else self.report.largest_error

    @property
    def result(self) -> str:
        return "failed" if self.report is None else "right" if self.right else "wrong"

    def __str__(self) -> str:
        return f"failed: {self.problem}" if self.report is None else str(self.report)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as a dictionary, for --json."""
        fields = {name: value for name, value in vars(self.training).items() if isinstance(value, (str, int))}
        outcome = {"seconds": self.seconds, "result": self.result, "largest_error": self.error}
        details = {"problem": self.problem} if self.report is None else self.report.as_dict()
        return {"setup": self.training.title, **fields, **outcome, **details}


def setups_in(path: str) -> list[dict[str, Any]]:
    """Return the setups in a TOML file, each a table [[setup]]."""
    try:
        table = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"verify: --setups must be a TOML file: {error}") from None
    setups = table.get("setup")
    if (
        set(table) != {"setup"}
        or not isinstance(setups, list)
        or not setups
        or not all(isinstance(each, dict) for each in setups)
    ):
        raise OptionError(
            f"verify: --setups must be a file of tables [[setup]] and nothing else, {path} has "
            f"{', '.join(table) or 'nothing'}"
        )
    for number, setup in enumerate(setups, 1):
        for name, value in setup.items():
            _check(name, value, f"verify: setup {number} of {path}")
    return setups


def _check(name: str, value: Any, where: str) -> None:
    if name not in FIELDS:
        raise OptionError(f"{where}: a setup has {', '.join(FIELDS)}, got {name!r}.{nearest(name, FIELDS)}")
    kind = FIELDS[name]
    if type(value) is not kind:
        raise OptionError(f"{where}: {name} must be of type {kind.__name__}, got {value!r}")
    if isinstance(value, int) and kind is int and value < LEAST.get(name, 1):
        raise OptionError(f"{where}: {name} must be at least {LEAST.get(name, 1)}, got {value}")


def steps_of(
    models: Sequence[str], setups: Sequence[dict[str, Any]], ways: Sequence[bool], **common: Any
) -> list[Training]:
    """Return the steps of every model in every setup, with and without Liger; fields of a setup take precedence."""
    steps = []
    for model, setup, liger in product(models, setups, ways):
        named: dict[str, Any] = {"model": model, "liger": liger, **common, **setup}
        named.setdefault("ranks", max(2, named.get("tp", 1) * named.get("cp", 1)))
        steps.append(Training(**named))
    # Setups that name their model or `liger` would repeat. The comparisons of a model follow each other.
    order = list(dict.fromkeys(training.model for training in steps))
    unique = [training for number, training in enumerate(steps) if training not in steps[:number]]
    for training in unique:
        training.check()
    return sorted(unique, key=lambda training: order.index(training.model))


def outcomes(
    matrix: Sequence[Training], *, tolerance: float, patience: float, limit: float, device: str = "cpu"
) -> Iterator[Outcome]:
    """Yield the outcome of every comparison, even if others fail.

    The result of one process is computed once for each model and data.
    """
    for training in matrix:
        check(training.ranks, tolerance, device)
    for _, alike in groupby(matrix, lambda training: training.model):
        with TemporaryDirectory(prefix="liger-verify-") as folder:
            # Keyed by repr, because options cannot be hashed.
            truths: dict[str, tuple[str, str]] = {}
            for training in alike:
                start, report, key = time.perf_counter(), None, repr(training.truth)
                if key not in truths:
                    truths[key] = _truth(training.truth, mkdtemp(dir=folder), patience, limit)
                truth_folder, problem = truths[key]
                if not problem:
                    options: dict[str, Any] = {"tolerance": tolerance, "patience": patience, "limit": limit}
                    options |= {"ranks": training.ranks, "sizes": training.sizes, "device": device}
                    try:
                        report = compare_with_truth(training, truth_folder, **options)
                    except Exception as error:
                        problem = reason_of(error)
                yield Outcome(training, time.perf_counter() - start, report, problem)


def packing_outcomes(packings: Sequence[Packing], tolerance: float) -> Iterator[Outcome]:
    """Yield the outcome of every comparison of packed documents, even if others fail."""
    for _, alike in groupby(packings, lambda packing: (packing.model, packing.liger)):
        model = None
        for packing in alike:
            start, report, problem = time.perf_counter(), None, ""
            try:
                model = model or packing.build()
                report = packing.report(model, tolerance)
            except Exception as error:
                problem = reason_of(error)
            yield Outcome(packing, time.perf_counter() - start, report, problem)


def _truth(training: Training, folder: str, patience: float, limit: float) -> tuple[str, str]:
    """Return the folder with the results of one process, and why it has none, or an empty string."""
    try:
        leave_truth(training, folder, patience=patience, limit=limit)
    except Exception as error:
        return folder, f"one process in float64: {reason_of(error)}"
    return folder, ""


def reason_of(error: Exception) -> str:
    """Return a line about an exception; for a failed run, the error of the process that failed first."""
    return next(iter(getattr(error, "__notes__", [])), f"{type(error).__name__}: {error}")
