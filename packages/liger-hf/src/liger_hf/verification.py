# SPDX-License-Identifier: Apache-2.0
"""A candidate is accepted only if its outputs and gradients are as accurate as those of the module that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from liger_core import BackendError
from liger_core.accuracy import error, judge
from liger_hf.isolation import DoublePrecision, undisturbed
from liger_hf.rule import Candidate, Found
from liger_hf.stand_in import Case, Results, Unfit


@dataclass(frozen=True)
class Decision:
    """The candidate that replaces every module of a kind, or why none does."""

    candidate: Candidate | None
    reason: str


def decide(found: Found, verify: bool) -> Decision:
    """Run original and candidates on small random input; of those that pass, the one closest to the original is taken.

    Without verification the candidates are compared only by their float32 and bfloat16 outputs on the CPU.
    """
    device = found.device() if verify and found.device is not None else torch.device("cpu")
    dtypes = dict.fromkeys((found.dtype, torch.float32, torch.bfloat16) if verify else (torch.float32, torch.bfloat16))
    assert found.original is not None and found.cases is not None
    with undisturbed(device):
        try:
            known = [(case, *_original(found.original, case)) for case in found.cases(device, dtypes)]
        except BackendError:
            raise
        except Unfit as reason:
            return Decision(None, str(reason))
        except Exception as problem:
            return Decision(None, f"it could not be checked, since the module did not run on a small input: {_short(problem)}")
        doubtful = [f"{case.name}, {name}" for case, plain, exact in known for name in _doubtful(case.dtype, plain, exact)]
        if doubtful:
            return Decision(None, f"it could not be checked, since its float64 run gives another result ({doubtful[0]})")
        candidates = list(found.candidates())
        verdicts = [_verdict(candidate, known, verify) for candidate in candidates]
    passed = [(distance, index) for index, (problem, distance) in enumerate(verdicts) if problem is None]
    if passed:
        best = candidates[min(passed)[1]]
        words = "outputs and gradients agree" if verify else "not verified"
        return Decision(best, f"{words}{', ' + best.detail if best.detail else ''}")
    tried: dict[str, str | None] = {}
    for candidate, (wrong, _) in zip(candidates, verdicts, strict=True):
        tried.setdefault(candidate.op.name, wrong)
    return Decision(None, "; ".join(["no op computes what the module does", *(f"{op}: {wrong}" for op, wrong in tried.items())]))


def _original(function: Callable[..., Any], case: Case) -> tuple[Results, Results]:
    with DoublePrecision():
        exact = case.run(function, True)
    return case.run(function, False), exact


def _doubtful(dtype: torch.dtype, plain: Results, exact: Results) -> Iterator[str]:
    """The results that differ so much in float64 that any candidate would seem accurate."""
    for name, value in plain.items():
        if error(value, exact[name]).frobenius > (0.01 if dtype == torch.float32 else 0.3):
            yield name


def _verdict(candidate: Candidate, known: list[tuple[Case, Results, Results]], verify: bool) -> tuple[str | None, float]:
    """(the problem or None, distance to the original's own outputs)."""
    distance = 0.0
    for case, original, exact in known:
        try:
            got = case.run(candidate.function, False)
        except BackendError:
            raise
        except Exception as trouble:
            return f"{case.name}: {_short(trouble)}", float("inf")
        if got.keys() != original.keys():
            return f"{case.name}: {', '.join(original)} expected, got {', '.join(got)}", float("inf")
        for name, result in got.items():
            if name.startswith("gradient") and not verify:
                continue
            wrong = judge(result, original[name], exact[name], case.dtype)
            if wrong:
                return f"{case.name}, {name}: {wrong}", float("inf")
            distance += error(result, original[name]).frobenius
    return None, distance


def _short(problem: BaseException) -> str:
    text = str(problem).strip().split("\n")[0]
    return f"{type(problem).__name__}: {text[:160]}"
