# SPDX-License-Identifier: Apache-2.0
"""Ops without weights as modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from liger_core import ops
from liger_core.nn.arguments import arguments_of, check_options
from liger_core.op import Op

# What a parameter of an op must be annotated with to belong to the call alone.
TENSORS = ("Tensor", "Tensor | None")


class FunctionModule(nn.Module):
    """A function without weights as a module: `module(tensors)` is `function(tensors, **options)`.

    An option that may be a tensor, as normalizer, may also be passed in the call.
    """

    function: ClassVar[Callable[..., Any]]
    tensors: ClassVar[tuple[str, ...]]
    known: ClassVar[Mapping[str, Any]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        check_options(type(self).__name__, options, self.known)
        self.options = options

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(**{**self.options, **arguments_of(self, self.tensors, inputs, named)})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def function_module(name: str, function: Any) -> type[FunctionModule]:
    """The class of a function: parameters of the call are its tensors and what has no default."""
    parameters = inspect.signature(function).parameters.values()
    of_call = [p for p in parameters if p.default is p.empty or p.annotation in TENSORS]
    options = {p.name: p for p in parameters if p not in of_call}
    body = {"function": function if isinstance(function, Op) else staticmethod(function), "tensors": tuple(p.name for p in of_call)}
    # The module that holds the class, where pickle looks for it.
    body["__module__"] = sys._getframe(1).f_globals["__name__"]
    return type(name, (FunctionModule,), {**_described(function, options.values()), **body, "known": options})


def _described(function: Any, options: Any) -> dict[str, Any]:
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in options]
    return {"__doc__": function.__doc__, "__signature__": inspect.Signature(keywords)}


Softmax = function_module("Softmax", ops.softmax)
Sparsemax = function_module("Sparsemax", ops.sparsemax)
Sinkhorn = function_module("Sinkhorn", ops.sinkhorn)
ProjectStreams = function_module("ProjectStreams", ops.project_streams)
MixStreams = function_module("MixStreams", ops.mix_streams)
MergeStreams = function_module("MergeStreams", ops.merge_streams)
RoPE = function_module("RoPE", ops.rope)
SwiGLU = function_module("SwiGLU", ops.swiglu)
GeGLU = function_module("GeGLU", ops.geglu)
ReLUSquared = function_module("ReLUSquared", ops.relu_squared)

LogProb = function_module("LogProb", ops.linear_log_prob)
CrossEntropyLoss = function_module("CrossEntropyLoss", ops.cross_entropy)
LinearCrossEntropyLoss = function_module("LinearCrossEntropyLoss", ops.linear_cross_entropy)
LinearDivergenceLoss = function_module("LinearDivergenceLoss", ops.linear_divergence)
KLDivLoss = function_module("KLDivLoss", ops.kl_div)
JSDLoss = function_module("JSDLoss", ops.jsd)
TotalVariationLoss = function_module("TotalVariationLoss", ops.total_variation)
