# SPDX-License-Identifier: Apache-2.0
"""Accept a candidate only if its outputs and gradients are as accurate as the replaced module's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from liger_core import BackendError
from liger_core.accuracy import error, judge
from liger_core.private_names import replacing
from liger_hf.isolation import DoublePrecision, undisturbed
from liger_hf.rule import Candidate, Found
from liger_hf.stand_in import MODE, Case, Results, Unfit

NO_OP = "no op matches"


@dataclass(frozen=True)
class Decision:
    """The candidate that replaces every module of a kind, or why none does, perhaps with the figures of its check."""

    candidate: Candidate | None
    reason: str
    details: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of checking one candidate on one draw of inputs.

    problem   why the first failing case fails; None if the candidate passes all cases
    passed    the number of cases before the failing one
    distance  the distance from the original's outputs; in a failing case, the error of the result
    close     whether it may pass with another draw, because its errors are as small as rounding errors
    details   the case, its result and all figures
    """

    problem: str | None
    passed: int
    distance: float
    close: bool = False
    details: str = ""


# The original may round the largest elements well by chance: on one draw, the more accurate swiglu had 1.3 times the
# error of Falcon-H1's gated MLP. A candidate that is less accurate also fails on other draws.
DRAWS, LUCK = 3, 2.0


def decide(match: Found, verify: bool) -> Decision:
    """Run the original and the candidates on small random input, and take the closest candidate that passes.

    Without verification the candidates are compared only by their float32 and bfloat16 outputs on the CPU.
    """
    device = match.device() if verify and match.device is not None else torch.device("cpu")
    floats = (torch.float32, torch.bfloat16)
    dtypes = tuple(dict.fromkeys((match.dtype, *floats) if verify else floats))
    first: dict[Candidate, Verdict] = {}
    verdicts: dict[Candidate, Verdict] = {}
    for number in range(DRAWS):
        with undisturbed(device), replacing(MODE, "draw", number):
            known = _known(match, device, dtypes)
            if isinstance(known, Decision):
                return known
            # After the cases, which may record the order in which the module calls its children.
            close = [candidate for candidate, verdict in verdicts.items() if verdict.close]
            verdicts = {c: _verdict(c, known, verify) for c in (close if number else list(match.candidates()))}
        first = first or verdicts
        passed = {candidate: verdict.distance for candidate, verdict in verdicts.items() if verdict.problem is None}
        if passed:
            best = min(passed, key=lambda candidate: passed[candidate])
            agreement = "outputs and gradients agree" if verify else "not verified"
            return Decision(best, ", ".join(filter(None, (agreement, best.detail))))
        if not any(verdict.close for verdict in verdicts.values()):
            break
    if not first:
        return Decision(None, NO_OP)
    closest = min(first, key=lambda candidate: (-first[candidate].passed, first[candidate].distance))
    name = f"{closest.op.name} ({closest.detail})" if closest.detail else closest.op.name
    return Decision(None, f"{NO_OP}. Closest: {name}. {first[closest].problem}", first[closest].details)


def _known(
    match: Found, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> list[tuple[Case, Results, Results]] | Decision:
    """Return the cases with the original's results, also in float64; or a decision why it cannot be checked."""
    assert match.original is not None and match.cases is not None
    try:
        known = [(case, *_original(match.original, case)) for case in match.cases(device, dtypes)]
    except BackendError:
        raise
    except Unfit as reason:
        return Decision(None, str(reason))
    except Exception as problem:
        return Decision(
            None, f"it could not be checked, since the module did not run on a small input: {_short(problem)}"
        )
    doubtful = [f"{case.name}, {name}" for case, plain, exact in known for name in _doubtful(case.dtype, plain, exact)]
    if doubtful:
        return Decision(None, f"it could not be checked, since its float64 run gives another result ({doubtful[0]})")
    return known


def _original(function: Callable[..., Any], case: Case) -> tuple[Results, Results]:
    with DoublePrecision():
        exact = case.run(function, True)
    return case.run(function, False), exact


def _doubtful(dtype: torch.dtype, plain: Results, exact: Results) -> Iterator[str]:
    """Yield the names of results that differ so much from float64 that any candidate would seem accurate."""
    for name, value in plain.items():
        if error(value, exact[name]).frobenius > (0.01 if dtype == torch.float32 else 0.3):
            yield name


def _verdict(candidate: Candidate, known: list[tuple[Case, Results, Results]], verify: bool) -> Verdict:
    distance, failed = 0.0, None
    for number, (case, original, exact) in enumerate(known):
        try:
            got = case.run(candidate.function, False)
        except BackendError:
            raise
        except Exception as trouble:
            return Verdict(f"It fails ({case.name}): {_short(trouble)}", number, float("inf"))
        if got.keys() != original.keys():
            words = f"It has other results ({case.name}): {', '.join(original)} expected, got {', '.join(got)}"
            return Verdict(words, number, float("inf"))
        for name, result in got.items():
            if name.startswith("gradient") and not verify:
                continue
            wrong = judge(result, original[name], exact[name], case.dtype)
            distance += error(result, original[name]).frobenius if wrong is None else 0.0
            if wrong is not None:
                off = error(result, exact[name]).frobenius if result.shape == exact[name].shape else float("inf")
                figures = wrong.replace("reference", "original")
                short = figures.partition(", original")[0].replace(" (allowed", ", allowed")
                words = f"Its {name} is off ({case.name}): {short}"
                failed = failed or Verdict(words, number, off, True, f"{case.name}, {name}: {figures}")
                if judge(result, original[name], exact[name], case.dtype, leeway=LUCK):
                    return replace(failed, close=False)
    return failed or Verdict(None, len(known), distance)


def _short(problem: BaseException) -> str:
    text = str(problem).strip().split("\n")[0]
    return f"{type(problem).__name__}: {text[:160]}"
