# SPDX-License-Identifier: Apache-2.0
"""Runs a call forward and backward, and compares the results with the definition in float64."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.cases import Case, arguments_of, differentiable, in_float64, leaves, with_gradients
from conformance.variations import Change, Layout
from fuzz.rounding import Rounding
from liger_core import GradientError
from liger_core.accuracy import judge
from liger_core.kernels import Kernel, plain_matmuls

# A scalar loss gets this instead of a random cotangent; it is not 1, which a missing factor would pass.
SCALAR_COTANGENT = -1.7
# On the definition's error, and in how many ways its results are rounded where inputs or upstream gradients were
# changed.
LEEWAY, TRIES = 4.0, 4
# Units of round-off of a random upstream gradient's gradient that may be left of one that an upstream gradient makes
# zero.
LEFT = 64
Call = Callable[[Mapping[str, Any]], Any]
# How torch says itself that it does not differentiate a gradient: compiled functions, once_differentiable, formulas
# that it lacks.
REFUSAL = re.compile(
    "does not currently support double backward|differentiate twice|derivative for .* is not implemented|no autograd "
    "formula"
)


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
    call: Call,
    arguments: Mapping[str, Any],
    names: list[str],
    cotangents: Mapping[str, Tensor] | None = None,
    draw: Callable[[Tensor], Tensor] = cotangent_for,
) -> Result:
    """Call with gradients for the named arguments; given cotangents are used in each output's dtype, new ones are drawn
    otherwise."""
    given = with_gradients(arguments, names)
    outputs = leaves(call(given))
    active = {n: t for n, t in outputs.items() if t.requires_grad}
    if cotangents is None:
        weights = {n: draw(t) for n, t in active.items()}
    else:
        weights = {n: cotangents[n].to(t.dtype) for n, t in active.items() if n in cotangents}
    inputs = [given[n] for n in names]
    gradients: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if inputs and weights:
        gradients = torch.autograd.grad([active[n] for n in weights], inputs, list(weights.values()), allow_unused=True)
    detached = {n: t.detach() for n, t in outputs.items()}
    return Result(detached, dict(zip(names, gradients, strict=True)), weights, frozenset(active))


class Trial:
    """A case with its sample, and the definition's answers in the same dtype and in float64.

    layout  the strides of the upstream gradients that the case gets; the definition gets the same values densely
    change  applied to the sample's arguments first

    A gradient that the upstream gradient makes zero, or a result of extreme inputs, consists of round-off, of which two
    equally exact formulas have different amounts; so a layout or a change gets LEEWAY. Where one rounding decides, as
    between probabilities whose logits are in the thousands or in a sum that nearly cancels, the definition may also be
    lucky; what it would not have met with other roundings is then no fault. Nor is what is left of zero, up to LEFT
    units of round-off.
    """

    def __init__(self, case: Case, layout: Layout | None = None, change: Change | None = None) -> None:
        self.case = case
        self.leeway = 1.0 if layout is None and change is None else LEEWAY
        self.roundings = TRIES if change is not None or layout is not None else 0
        sample = case.sample()
        self.why = sample.why
        self.arguments = arguments_of(case.op, sample)
        self.names = differentiable(self.arguments, sample)
        if change is not None:
            self.arguments = change(self.arguments, self.names)

        def draw(output: Tensor) -> Tensor:
            dense = cotangent_for(output)
            return dense if layout is None else layout(dense, 0).contiguous()

        self.given = {n: v.clone() for n, v in self.arguments.items() if isinstance(v, Tensor)}
        # The definition says what the cotangents must look like, so that every backend gets the same ones.
        self.reference = self.defined(self.arguments, self.names, draw=draw)
        self.exact = self.defined(in_float64(self.arguments), self.names, self.reference.cotangents)
        dense = self.reference.cotangents
        self.cotangents = dense if layout is None else {n: layout(t, i) for i, (n, t) in enumerate(dense.items())}

    def define(self, arguments: Mapping[str, Any]) -> Any:
        return self.case.op.reference(**arguments)

    def defined(self, arguments: Mapping[str, Any], names: list[str], *cotangents: Any, **more: Any) -> Result:
        """The definition's answers, with the other arguments of `run`.

        It multiplies in the dtype of the arguments, since plain PyTorch is the yardstick.
        """
        with plain_matmuls():
            return run(self.define, arguments, names, *cotangents, **more)

    def run(self, names: list[str] | None = None, cotangents: Mapping[str, Tensor] | None = None) -> Result:
        chosen = self.names if names is None else names
        return run(self.case.call, self.arguments, chosen, self.cotangents if cotangents is None else cotangents)

    def expect(self, complaints: list[str]) -> None:
        """Fail with the complaints, if there are any, and with the purpose of the sample."""
        if complaints:
            raise AssertionError(f"{'; '.join(complaints)} – this sample is for: {self.why}")

    def partial(self, got: Result) -> bool:
        """Whether a floating input had no gradient."""
        floating = {n for n, v in self.arguments.items() if isinstance(v, Tensor) and v.is_floating_point()}
        return not floating <= set(got.gradients)

    def complaints(
        self,
        got: Result,
        reference: Result | None = None,
        exact: Result | None = None,
        dtype: Any = None,
        define: Callable[[], Result] | None = None,
    ) -> list[str]:
        """Violations of the criterion, and overwritten inputs; an empty list is a pass.

        With `define`, which computes the reference, the definition may be lucky, as with changed inputs.
        """
        exact, dtype = exact or self.exact, dtype or self.case.dtype
        roundings = 0 if reference else self.roundings
        if define is None:
            define = partial(self.defined, self.arguments, self.names, self.reference.cotangents)
            reference = reference or self.reference
        else:
            reference, roundings = define(), TRIES
        found = self._against(reference, got, exact, dtype)
        for seed in range(roundings if found else 0):
            with Rounding(seed):
                rounded = define()
            if not self._against(rounded, got, exact, dtype):
                return []
        return found

    def _against(self, reference: Result, got: Result, exact: Result, dtype: torch.dtype) -> list[str]:
        # With an input frozen, an output that no longer depends on any other may still ask for a gradient.
        if not reference.active <= got.active or (got.active - reference.active and not self.partial(got)):
            return [f"differentiable outputs {sorted(reference.active)} expected, got {sorted(got.active)}"]
        found = [f"{name} was overwritten" for name in different_bits(self.given, self.arguments)]
        found += output_complaints(got.outputs, reference.outputs, exact.outputs, dtype, self.leeway)
        for name, value in got.gradients.items():
            want, truth = reference.gradients[name], exact.gradients[name]
            if value is None or want is None or truth is None:
                complaint = None if value is want else f"{'None' if want is None else 'a tensor'} expected"
            else:
                complaint = judge(value, want, truth, dtype, leeway=self.leeway)
                complaint = None if complaint and self._is_left_of_zero(name, value, truth) else complaint
            if complaint:
                found.append(f"gradient of {name}: {complaint}")
        return found

    def _is_left_of_zero(self, name: str, value: Tensor, truth: Tensor) -> bool:
        """Whether the gradient and its exact value are round-off beside the gradient of a random upstream gradient."""
        usual = self._usual_gradients[name]
        if self.leeway == 1.0 or usual is None:
            return False
        unit = torch.finfo(value.dtype).eps * float(usual.norm())
        return float(truth.norm()) <= unit and float(value.double().norm()) <= LEFT * unit

    @cached_property
    def _usual_gradients(self) -> dict[str, Tensor | None]:
        """The exact gradients of random upstream gradients."""
        return self.defined(in_float64(self.arguments), self.names).gradients


Tensors = dict[str, Tensor]


def output_complaints(
    got: Tensors, reference: Tensors, exact: Tensors, dtype: torch.dtype, leeway: float = 1.0
) -> list[str]:
    """Violations of the criterion among the outputs."""
    if list(got) != list(reference):
        return [f"outputs {list(reference)} expected, got {list(got)}"]
    judged = {name: judge(value, reference[name], exact[name], dtype, leeway=leeway) for name, value in got.items()}
    return [f"{name}: {complaint}" for name, complaint in judged.items() if complaint]


class KernelCall(NamedTuple):
    """One execution of a `Kernel`."""

    kernel: Kernel
    args: tuple[Any, ...]
    outputs: tuple[Tensor | None, ...]

    @property
    def needs(self) -> list[bool]:
        """The requested gradients; empty for a kernel that computes none."""
        return list(self.args[-1]) if self.kernel.schema.arguments[-1].name == "needs" else []

    def unasked(self) -> list[str]:
        """What is wrong if a single gradient was asked for. Gradients, and sums that they are made of, are named so."""
        named = zip(self.kernel.schema.returns, self.outputs, strict=True)
        results = [(r.name, t) for r, t in named if r.name.startswith(("grad_", "sum_"))]
        needs = self.needs if results else []
        found = [
            f"{self.kernel.name}: {name} must be None where nobody asked for it"
            for (name, t), need in zip(results, needs, strict=True)
            if t is not None and not need
        ]
        if sum(self.needs) > 1:
            found.append(f"{self.kernel.name}: one gradient must be asked for, got needs={self.needs}")
        return found


def differences(first: Result, second: Result) -> list[str]:
    """The outputs and gradients of two runs that differ in any bit."""
    names = different_bits(first.outputs, second.outputs)
    names += [f"gradient of {name}" for name in different_bits(first.gradients, second.gradients)]
    return [f"{name}: other bits in another run" for name in names]


def different_bits(first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None]) -> list[str]:
    """The names whose tensors differ in any bit (a NaN equals itself)."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())

    return [name for name, value in first.items() if not same(value, second[name])]


def penalty(
    call: Call, arguments: Mapping[str, Any], names: list[str], total: Callable[[Tensor], Tensor] = torch.square
) -> dict[str, Tensor] | None:
    """Gradients of a loss and of the summed squares of its gradients, or None where that is refused.

    The loss sums `total` of each output.
    """
    given = with_gradients(arguments, names)
    loss = sum(total(t).sum() for t in leaves(call(given)).values() if t.requires_grad)
    inputs = [given[n] for n in names]
    try:
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        # Unlike autograd.grad, it also runs what leads to no input, where torch puts its refusals.
        torch.autograd.backward(loss + sum(g.square().sum() for g in first))
    except GradientError:
        return None
    except RuntimeError as error:
        if REFUSAL.search(str(error)):
            return None
        raise
    return {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in zip(names, inputs, strict=True)}
