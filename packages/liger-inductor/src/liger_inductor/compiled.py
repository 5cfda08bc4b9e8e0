# SPDX-License-Identifier: Apache-2.0
"""An implementation of an op: its reference and the derivative, each compiled at its first call."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import Op
from liger_core.autograd import check_backward
from liger_core.kernels import is_transforming
from liger_core.op import OVERWRITING
from liger_core.private_torch import DisableAutocast, autocast_is_on, dispatch_stack_length

# Programs that torch.compile may make of a function: one for each dtype, number of dimensions, pattern of gradients and
# value of an option, for sizes of 1, and for all other sizes. Calls past them run uncompiled.
PROGRAMS = 64
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class Programs(NamedTuple):
    """The compiled functions of an op.

    forward   (tensors, options) → outputs
    backward  (tensors, options, names, upstream gradients) → the gradients of the tensors with these names
    """

    op: str
    forward: Callable[..., Any]
    backward: Callable[..., tuple[Tensor, ...]]


def compiled(op: Op[..., Any]) -> Callable[..., Any]:
    """Return the reference of an op, compiled for tensors of any size."""
    reference, names = op.reference, tuple(op.signature.parameters)
    programs = functools.cache(lambda: _programs(str(op.name), reference))

    @functools.wraps(reference)
    def implementation(*args: Any, **options: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **options}
        if not _compiles(arguments):
            return reference(**arguments)
        if autocast_is_on():
            with DisableAutocast():
                return _call(programs(), arguments)
        return _call(programs(), arguments)

    return implementation


def _compiles(arguments: Mapping[str, Any]) -> bool:
    """Whether to compile a call: not under another compiler, dispatch mode or transform, and not in place."""
    return not (
        torch.compiler.is_compiling()
        or dispatch_stack_length()
        or is_transforming()
        or any(isinstance(value, Tensor) and type(value) not in _PLAIN for value in arguments.values())
        or any(arguments.get(name) for name in OVERWRITING)
    )


def _call(programs: Programs, arguments: Mapping[str, Any]) -> Any:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in arguments.items() if name not in tensors}
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
        return _Derived.apply(programs, tuple(tensors), options, *tensors.values())
    return _run(programs, tensors, options)


def _run(programs: Programs, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> Any:
    # Detached, because a program is specific to requires_grad and to the size of parameters.
    with torch.no_grad():
        return programs.forward({name: tensor.detach() for name, tensor in tensors.items()}, options)


class _Derived(torch.autograd.Function):
    """The autograd node of an op.

    It saves only the arguments; the backward program recomputes what it needs from the forward, fused with the rest.
    """

    @staticmethod
    def forward(
        ctx: Any, programs: Programs, names: tuple[str, ...], options: Mapping[str, Any], *tensors: Tensor
    ) -> Any:
        ctx.programs, ctx.names, ctx.options = programs, names, options
        ctx.save_for_backward(*tensors)
        result = _run(programs, dict(zip(names, tensors, strict=True)), options)
        ctx.strides = [output.stride() for output in (result if isinstance(result, tuple) else (result,))]
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(ctx.programs.op, *upstream)
        tensors = {name: tensor.detach() for name, tensor in zip(ctx.names, ctx.saved_tensors, strict=True)}
        requested = tuple(name for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needed)
        laid = tuple(_laid(gradient, strides) for gradient, strides in zip(upstream, ctx.strides, strict=True))
        gradients = dict(zip(requested, ctx.programs.backward(tensors, ctx.options, requested, laid), strict=True))
        return None, None, None, *(gradients.get(name) for name in ctx.names)


def _laid(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the gradient with the strides of its output.

    Any other layout, such as that of a sum or a slice, would compile a separate program.
    """
    if gradient.stride() == strides:
        return gradient
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _programs(op: str, reference: Callable[..., Any]) -> Programs:
    def forward(tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> Any:
        return reference(**tensors, **options)

    def backward(
        tensors: Mapping[str, Tensor], options: Mapping[str, Any], names: tuple[str, ...], upstream: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        def outputs(*chosen: Tensor) -> Any:
            return reference(**{**tensors, **dict(zip(names, chosen, strict=True))}, **options)

        pull: Callable[..., tuple[Tensor, ...]]
        result, pull, *_ = torch.func.vjp(outputs, *(tensors[name] for name in names))
        return pull(upstream if isinstance(result, tuple) else upstream[0])

    # torch 2.11 has one limit for the whole process, 8 by default.
    limit: Any = (
        {"recompile_limit": PROGRAMS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    )
    return Programs(op, *(torch.compile(_own(each), dynamic=True, **limit) for each in (forward, backward)))


def _own(function: Any) -> FunctionType:
    """Return a copy of a function with its own code object.

    torch.compile counts and looks up programs by code object, which all ops would otherwise share.
    """
    return FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
