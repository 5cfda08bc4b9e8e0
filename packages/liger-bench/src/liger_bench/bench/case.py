# SPDX-License-Identifier: Apache-2.0
"""One workload of one op, and the calls of one implementation on it that can be timed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from liger_bench.bench.implementations import Arguments, Implementation
from liger_core import accuracy
from liger_core.op import Op, Work, Workload
from liger_core.private_torch import FakeTensorMode

GRADIENTS = "gradients"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Results:
    """The results of a forward and backward pass."""

    outputs: list[Tensor]
    gradients: list[Tensor]


@dataclass(frozen=True)
class Errors:
    """The relative error (Frobenius norm) of each floating-point output and gradient."""

    outputs: list[float]
    gradients: list[float]

    def ratio(self, other: Self) -> float | None:
        """Return the largest ratio of a gradient's error to the other's; None if all of the other's are 0."""
        return max((mine / its for mine, its in zip(self.gradients, other.gradients, strict=True) if its), default=None)


@dataclass
class Case:
    """The arguments of one workload, which of them get a gradient, and the gradients that arrive at the outputs."""

    op: Op[..., Any]
    workload: Workload
    arguments: Arguments
    trained: tuple[str, ...]
    dtype: torch.dtype
    grad_outputs: list[Tensor] = field(default_factory=list)
    exact: Results | None = None

    def work(self) -> Work:
        bound = self.op.signature.bind(**self.arguments)
        return self.op.work(*bound.args, **bound.kwargs)

    @property
    def evaluates(self) -> bool:
        """Whether forward may do extra work when gradients are required, as losses do; their results are small."""
        tensors = [v.numel() for v in self.arguments.values() if isinstance(v, Tensor)]
        return sum(o.numel() for o in self.grad_outputs) < max(tensors) // 2

    def set_exact(self) -> None:
        """Compute the exact outputs and gradients: the reference in float64."""
        wide = {
            name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for name, v in self.arguments.items()
        }
        bound = self.op.signature.bind(**trainable(wide, self.trained))
        outputs = tree_leaves(self.op.reference(*bound.args, **bound.kwargs))
        leaves = [bound.arguments[name] for name in self.trained]
        self.exact = Results([o.detach() for o in outputs], gradients_of(outputs, leaves, self.grad_outputs))

    def errors(self, results: Results) -> Errors | None:
        """Return the errors of the results relative to the exact ones; None if those are unknown."""
        if self.exact is None:
            return None
        return Errors(_errors(results.outputs, self.exact.outputs), _errors(results.gradients, self.exact.gradients))

    def fingerprints(self) -> dict[str, list[int]]:
        """Return a checksum of every tensor that implementations share; a write to the tensor changes it."""
        tensors = {name: [v] for name, v in self.arguments.items() if isinstance(v, Tensor)} | {
            GRADIENTS: self.grad_outputs
        }
        return {
            name: [int(t.view(INTEGERS[t.element_size()]).sum(dtype=torch.int64)) for t in group]
            for name, group in tensors.items()
        }

    def refill(self) -> None:
        """Restore the initial values of every tensor."""
        device = next(v.device for v in self.arguments.values() if isinstance(v, Tensor))
        fresh = make_case(self.op, self.workload, device, self.dtype)
        for name, value in self.arguments.items():
            if isinstance(value, Tensor):
                value.copy_(fresh.arguments[name])
        for gradient, initial in zip(self.grad_outputs, fresh.grad_outputs, strict=True):
            gradient.copy_(initial)


class Repeatable(NamedTuple):
    """A call, and the preparation that each call needs."""

    call: Callable[[], Results]
    before: Callable[[], None]


class CaseRun:
    """The calls of one implementation on a case. It gets private copies of the arguments that it overwrites.

    Raises Unsupported if it cannot take the arguments.
    """

    def __init__(self, case: Case, implementation: Implementation) -> None:
        self.case, self.implementation = case, implementation
        arguments = implementation.taken(case.arguments)
        self._function = implementation.prepared()
        self._positional, self._keywords = implementation.order(arguments)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.arguments = {
            name: self._own(v) if name in implementation.overwrites else v for name, v in arguments.items()
        }
        self.grad_outputs = [self._own(g) if GRADIENTS in implementation.overwrites else g for g in case.grad_outputs]
        self._leaves = trainable(self.arguments, case.trained)
        self._trained = [self._leaves[name] for name in case.trained]

    def restore(self) -> None:
        """Restore the initial values of overwritten arguments."""
        for copy, value in self._copies:
            # Hidden from autograd, which would report its saved tensors as modified.
            copy.data.copy_(value)

    @property
    def passes(self) -> dict[str, Callable[[], Repeatable]]:
        """Pass → a function that builds its call, which can then be repeated."""
        return {
            "forward": lambda: Repeatable(self.forward, self.restore),
            "backward": self.backward,
            "full": lambda: Repeatable(self.full, self.restore),
            "evaluation": lambda: Repeatable(self.evaluation, self.restore),
        }

    def forward(self) -> Results:
        """Call the function with inputs that require gradients."""
        return Results(self._call(self._leaves), [])

    def evaluation(self) -> Results:
        """Call the function without gradients."""
        with torch.no_grad():
            return Results(self._call(self.arguments), [])

    def backward(self) -> Repeatable:
        """Build the graph once, or before every call if a backward pass consumes it."""
        self.restore()
        outputs = self._call(self._leaves)
        if not self.implementation.consumes:
            return Repeatable(
                lambda: Results([], gradients_of(outputs, self._trained, self.grad_outputs, retain=True)), self.restore
            )

        def again() -> None:
            self.restore()
            outputs.clear()
            outputs.extend(self._call(self._leaves))

        return Repeatable(lambda: Results([], gradients_of(outputs, self._trained, self.grad_outputs)), again)

    def full(self) -> Results:
        """Run a forward and a backward pass."""
        outputs = self._call(self._leaves)
        return Results(outputs, gradients_of(outputs, self._trained, self.grad_outputs))

    def _call(self, arguments: Arguments) -> list[Tensor]:
        positional = [arguments[name] for name in self._positional]
        return tree_leaves(self._function(*positional, **{name: arguments[name] for name in self._keywords}))

    def _own(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copy = value.clone()
        self._copies.append((copy, value))
        return copy


def make_case(op: Op[..., Any], workload: Workload, device: torch.device, dtype: torch.dtype) -> Case:
    """Return the case of a workload, with the same random numbers every time."""
    torch.manual_seed(0)
    args, kwargs = workload.make(device, dtype)
    arguments = dict(op.signature.bind(*args, **kwargs).arguments)
    fixed = constants(op) | set(workload.frozen)
    trained = tuple(
        n for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point() and n not in fixed
    )
    case = Case(op, workload, arguments, trained, dtype)
    for shape, stride, kind in _differentiable_outputs(case):
        gradient = torch.empty_strided(shape, stride, dtype=kind, device=device)
        # Rounded to the dtype of the inputs, because the float64 reference must get the same values.
        case.grad_outputs.append(
            gradient.copy_(torch.randn(shape, device=device, dtype=dtype)) if shape else gradient.fill_(1.0)
        )
    return case


def constants(op: Op[..., Any]) -> frozenset[str]:
    """Return the arguments that never get a gradient: those that are frozen in every sample."""
    names = [frozenset(sample.frozen) for sample in op.samples(torch.device("cpu"), torch.float32)]
    return frozenset.intersection(*names) if names else frozenset()


def trainable(arguments: Arguments, trained: tuple[str, ...]) -> Arguments:
    """Return the arguments, with the trained ones as new leaves that require gradients."""
    return {name: v.detach().requires_grad_() if name in trained else v for name, v in arguments.items()}


def gradients_of(
    outputs: list[Tensor], leaves: list[Tensor], grad_outputs: list[Tensor], *, retain: bool = False
) -> list[Tensor]:
    ends = [o for o in outputs if o.requires_grad]
    arriving = [g if g.dtype == o.dtype else g.to(o.dtype) for g, o in zip(grad_outputs, ends, strict=True)]
    return list(torch.autograd.grad(ends, leaves, arriving, retain_graph=retain))


def _differentiable_outputs(case: Case) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    """Return shape, stride and dtype of the outputs that have a gradient, from a call on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        fakes = tree_map_only(Tensor, mode.from_tensor, trainable(case.arguments, case.trained))
        outputs = tree_leaves(case.op.reference(**fakes))
        return [(o.shape, o.stride(), o.dtype) for o in outputs if o.requires_grad]


def _errors(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [accuracy.error(r, e).frobenius for r, e in zip(results, exact, strict=True) if e.is_floating_point()]
