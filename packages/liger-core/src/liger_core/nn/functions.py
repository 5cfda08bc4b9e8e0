# SPDX-License-Identifier: Apache-2.0
"""Ops without weights as modules."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_core import ops
from liger_core.nn.arguments import Parameter, arguments_of, bound, keywords, parameters_of, subclass
from liger_core.nn.described import docstring, of_call, of_options
from liger_core.nn.module import Module, check_options
from liger_core.op import Op, Sample

# What a parameter of an op must be annotated with to belong to the call alone.
TENSORS = (Tensor, Tensor | None, "Tensor", "Tensor | None")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Calls without options, by which options are checked when a module is made.
Calls = Callable[[], Iterable[Mapping[str, Any]]]


class FunctionModule(Module):
    """A function without weights as a module: `module(tensors)` is `function(tensors, **options)`.

    An option that may be a tensor, as normalizer, may also be passed in the call. A tensor that the constructor gets, by itself or in an option
    such as `Averaging(count=tensor)`, moves with the module, is not in the `state_dict`, and keeps its dtype.
    """

    function: ClassVar[Callable[..., Any]]
    tensors: ClassVar[tuple[str, ...]]
    signature: ClassVar[inspect.Signature]
    calls: ClassVar[Callable[..., Iterable[Mapping[str, Any]]]]

    def __init__(self, *inputs: Any, **named: Any) -> None:
        options = bound(type(self).__name__, self.signature, self.tensors, inputs, named)
        _check(self.function, self.calls, options)
        super().__init__(**{name: value for name, value in options.items() if not isinstance(value, Tensor)})
        for name, value in options.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=False)

    @property
    def options(self) -> dict[str, Any]:
        return {**self.arguments, **self._buffers}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(**{**self.options, **arguments_of(self, self.tensors, inputs, named)})

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.arguments = {name: _moved(value, fn) for name, value in self.arguments.items()}
        for name, value in before.items():
            moved = self._buffers[name]
            if value is not None and moved is not None:
                self._buffers[name] = _placed(value, moved)
        return self


def _moved(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """An option object with its tensors where fn puts them."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{name: _placed(old, fn(old)) for name, old in fields.items() if isinstance(old, Tensor)})


def _placed(value: Tensor, moved: Tensor) -> Tensor:
    """The value where it was moved to, and nothing else: `module.bfloat16()` would round a count of tokens, and `to_empty` lose it."""
    return moved if value.is_meta else value.to(moved.device)


def function_module(name: str, function: Any, calls: Calls | None = None) -> type[FunctionModule]:
    """The class of a function: parameters of the call are its tensors and what has no default, all others are options of the constructor.

    calls  returns calls without options, by which the options are checked when a module is made; for an op its samples
    """
    parameters = parameters_of(function)
    tensors = tuple(p.name for p in parameters.values() if p.default is Parameter.empty or p.annotation in TENSORS)
    signature = inspect.Signature(keywords(p for p in parameters.values() if p.name not in tensors))
    if calls is None:
        calls = _samples_of(function, tensors) if isinstance(function, Op) else tuple
    words = docstring(function, [of_options(function, signature.parameters), of_call(function, tensors)])
    own = function if isinstance(function, Op) else staticmethod(function)
    made: type[FunctionModule] = subclass(name, FunctionModule, words, signature, function=own, tensors=tensors, calls=staticmethod(calls))
    return made


def _check(function: Any, calls: Calls, options: Mapping[str, Any]) -> None:
    """An op checks before it computes; another function computes what it checks with."""
    if isinstance(function, Op):
        check_options(function.check, calls(), {name: _on_meta(value) for name, value in options.items()})
    else:
        # A function of the user, such as a loss of pairs, runs in the call alone.
        ours = {n: value for n, value in options.items() if not callable(value) or type(value).__module__.startswith("liger_core.")}
        check_options(function, calls(), ours)


def _samples_of(op: Op[..., Any], tensors: tuple[str, ...]) -> Calls:
    """Of all dtypes and shapes, so that an option is refused only if no tensors can make it right."""

    def calls() -> Iterator[dict[str, Any]]:
        for dtype in DTYPES:
            # Not drawn on the meta device, whose first sum imports a large part of torch.
            samples = op.samples(torch.device("cpu"), dtype)
            while (sample := _drawn_apart(samples)) is not None:
                given = op.signature.bind(*sample.args, **sample.kwargs).arguments
                yield {name: _on_meta(given[name]) for name in tensors if name in given}

    return calls


def _drawn_apart(samples: Iterator[Sample]) -> Sample | None:
    """The next sample, without a trace in the sequence of random numbers."""
    with torch.random.fork_rng(devices=[]):
        return next(samples, None)


def _on_meta(value: Any) -> Any:
    """Shape, dtype and whether a gradient is asked for."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, device="meta").requires_grad_(value.requires_grad)


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
