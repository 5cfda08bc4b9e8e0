# SPDX-License-Identifier: Apache-2.0
"""One workload of one op as calls that can be timed: forward, backward, and both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_core import accuracy
from liger_core.op import Op, Work, Workload

Results = dict[str, list[Tensor]]


@dataclass
class Case:
    """The arguments of one workload, which of them get a gradient, and the gradients that arrive at the outputs."""

    op: Op[..., Any]
    workload: str
    arguments: dict[str, Any]
    trained: tuple[str, ...]
    grad_outputs: list[Tensor] = field(default_factory=list)
    exact: Results | None = None

    def work(self) -> Work:
        bound = self.op.signature.bind(**self.arguments)
        return self.op.work(*bound.args, **bound.kwargs)

    def forward(self) -> list[Tensor]:
        """One call without gradients."""
        with torch.no_grad():
            return self._call(self.op, self.arguments)

    def backward(self) -> Callable[[], object]:
        """Build the graph; the function that is returned runs backward through it, again and again."""
        leaves = self._leaves(self.arguments)
        outputs = self._differentiable(self._call(self.op, leaves))
        return lambda: self._gradients(outputs, leaves, retain=True)

    def full(self) -> Results:
        """Forward and backward."""
        return self._both(self.op, self.arguments)

    def set_exact(self) -> None:
        """Compute the exact outputs and gradients: the reference in float64."""
        wide = {name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in self.arguments.items()}
        self.exact = self._both(self.op.reference, wide)

    def errors(self, results: Results) -> dict[str, float]:
        """The largest relative error (Frobenius norm) among the outputs and among the gradients, against the exact ones."""
        if self.exact is None:
            return {}
        found: dict[str, float] = {}
        for kind, tensors in results.items():
            pairs = [(r, e) for r, e in zip(tensors, self.exact[kind], strict=True) if r.is_floating_point()]
            found[kind] = max((accuracy.error(r, e).frobenius for r, e in pairs), default=0.0)
        return found

    def _both(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Results:
        leaves = self._leaves(arguments)
        outputs = self._call(function, leaves)
        gradients = self._gradients(self._differentiable(outputs), leaves, retain=False)
        return {"outputs": [o.detach() for o in outputs], "gradients": list(gradients)}

    def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
        bound = self.op.signature.bind(**arguments)
        result = function(*bound.args, **bound.kwargs)
        return list(result) if isinstance(result, tuple) else [result]

    def _leaves(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: v.detach().requires_grad_() if name in self.trained else v for name, v in arguments.items()}

    def _differentiable(self, outputs: list[Tensor]) -> list[Tensor]:
        return [o for o in outputs if o.requires_grad]

    def _gradients(self, outputs: list[Tensor], leaves: dict[str, Any], *, retain: bool) -> tuple[Tensor, ...]:
        given = [g.to(o.dtype) for g, o in zip(self.grad_outputs, outputs, strict=True)]
        return torch.autograd.grad(outputs, [leaves[name] for name in self.trained], given, retain_graph=retain)


def make_case(op: Op[..., Any], workload: Workload, device: torch.device, dtype: torch.dtype) -> Case:
    """The case with the same random numbers every time."""
    torch.manual_seed(0)
    args, kwargs = workload.make(device, dtype)
    arguments = dict(op.signature.bind(*args, **kwargs).arguments)
    fixed = constants(op)
    trained = tuple(n for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point() and n not in fixed)
    case = Case(op, workload.name, arguments, trained)
    # The gradients at the outputs have the dtype of the outputs, so they are drawn before anything runs in float64.
    with torch.enable_grad():
        outputs = case._differentiable(case._call(op.reference, case._leaves(arguments)))
    case.grad_outputs = [torch.ones_like(o) if o.dim() == 0 else torch.randn_like(o) for o in outputs]
    return case


def constants(op: Op[..., Any]) -> frozenset[str]:
    """The arguments that never get a gradient: those that are frozen in every sample."""
    names = [frozenset(sample.frozen) for sample in op.samples(torch.device("cpu"), torch.float32)]
    return frozenset.intersection(*names) if names else frozenset()
