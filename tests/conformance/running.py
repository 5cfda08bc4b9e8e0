# SPDX-License-Identifier: Apache-2.0
"""Runs a call forward and backward and compares what came out with the definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.cases import Case, arguments_of, differentiable, in_float64, leaves, with_gradients
from liger_core.accuracy import judge

# A scalar loss gets this instead of a random cotangent; it is not 1, which a missing factor would pass.
SCALAR_COTANGENT = -1.7


@dataclass(frozen=True)
class Result:
    """Outputs and gradients by name; the cotangents that made the gradients can be used again.

    `active` names the outputs that require a gradient.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    cotangents: dict[str, Tensor]
    active: frozenset[str]


def cotangent_for(output: Tensor) -> Tensor:
    if output.dim() == 0:
        return torch.full_like(output, SCALAR_COTANGENT)
    return torch.randn(output.shape, dtype=torch.float32, device=output.device).to(output.dtype)


def run(
    call: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any], names: list[str], cotangents: Mapping[str, Tensor] | None = None
) -> Result:
    """Call with gradients for the named arguments; given cotangents are used in each output's dtype, new ones are drawn otherwise."""
    given = with_gradients(arguments, names)
    outputs = leaves(call(given))
    active = {n: t for n, t in outputs.items() if t.requires_grad}
    if cotangents is None:
        weights = {n: cotangent_for(t) for n, t in active.items()}
    else:
        weights = {n: cotangents[n].to(t.dtype) for n, t in active.items() if n in cotangents}
    inputs = [given[n] for n in names]
    gradients: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if inputs and weights:
        gradients = torch.autograd.grad([active[n] for n in weights], inputs, list(weights.values()), allow_unused=True)
    return Result({n: t.detach() for n, t in outputs.items()}, dict(zip(names, gradients, strict=True)), weights, frozenset(active))


class Trial:
    """A case with its sample, and the definition's answers in the same dtype and in float64, computed when asked for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        sample = case.sample()
        self.arguments = arguments_of(case.op, sample)
        self.names = differentiable(self.arguments, sample)
        # The definition says what the cotangents must look like, so that every backend gets the same ones.
        self.reference = run(self.define, self.arguments, self.names)
        self.exact = run(self.define, in_float64(self.arguments), self.names, self.reference.cotangents)

    def define(self, arguments: Mapping[str, Any]) -> Any:
        return self.case.op.reference(**arguments)

    def run(self, names: list[str] | None = None, cotangents: Mapping[str, Tensor] | None = None) -> Result:
        chosen = self.names if names is None else names
        return run(self.case.call, self.arguments, chosen, self.reference.cotangents if cotangents is None else cotangents)

    def partial(self, got: Result) -> bool:
        """Whether a floating input had no gradient."""
        floating = {n for n, v in self.arguments.items() if isinstance(v, Tensor) and v.is_floating_point()}
        return not floating <= set(got.gradients)

    def complaints(
        self, got: Result, reference: Result | None = None, exact: Result | None = None, dtype: torch.dtype | None = None
    ) -> list[str]:
        """What does not meet the criterion; an empty list is a pass."""
        reference, exact, dtype = reference or self.reference, exact or self.exact, dtype or self.case.dtype
        # With an input frozen, an output that no longer depends on any other may still ask for a gradient.
        if not reference.active <= got.active or (got.active - reference.active and not self.partial(got)):
            return [f"differentiable outputs {sorted(reference.active)} expected, got {sorted(got.active)}"]
        found = output_complaints(got.outputs, reference.outputs, exact.outputs, dtype)
        for name, value in got.gradients.items():
            want, truth = reference.gradients[name], exact.gradients[name]
            if value is None or want is None or truth is None:
                complaint = None if value is want else f"{'None' if want is None else 'a tensor'} expected"
            else:
                complaint = judge(value, want, truth, dtype)
            if complaint:
                found.append(f"gradient of {name}: {complaint}")
        return found


def output_complaints(got: dict[str, Tensor], reference: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """What does not meet the criterion among outputs alone."""
    if list(got) != list(reference):
        return [f"outputs {list(reference)} expected, got {list(got)}"]
    judged = {name: judge(value, reference[name], exact[name], dtype) for name, value in got.items()}
    return [f"{name}: {complaint}" for name, complaint in judged.items() if complaint]


def different_bits(first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None]) -> list[str]:
    """The names whose tensors are not bit for bit the same (a NaN equals itself)."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())

    return [name for name, value in first.items() if not same(value, second[name])]
