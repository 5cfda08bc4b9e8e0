# SPDX-License-Identifier: Apache-2.0
"""Ops that run a backend's row passes: each op's function is written once, and bound to every backend's kernels."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from liger_core.kernels import reference_kernel
from liger_core.op import Op

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K")
# Raises Unsupported to decline a call by its tensors.
Supported = Callable[..., None]


class ComposedOp(Op[P, R]):
    """An op whose `implementation(row passes, kernel class, supported)` returns its function for a backend."""

    implementation: Callable[..., Callable[P, R]]


def composed_op(
    passes: Any,
    kernels: Callable[..., K],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    **description: Any,
) -> Callable[[Callable[Concatenate[K, Supported, P], R]], ComposedOp[P, R]]:
    """Turn a function (kernels, supported, *arguments of the op) into an op.

    passes       the row passes of the reference
    kernels      (row passes, kernel class) → the function's first argument
    wrap         applied to the function of each backend
    description  the other arguments of `liger_core.op.op`
    """

    def describe(function: Callable[Concatenate[K, Supported, P], R]) -> ComposedOp[P, R]:
        signature = inspect.signature(function)
        signature = signature.replace(parameters=list(signature.parameters.values())[2:])

        def implementation(passes: Any, kernel_class: Callable[..., Any], supported: Supported = _accept) -> Any:
            instance = kernels(passes, kernel_class)
            # A partial function adds no frame to a call.
            call: Any = functools.partial(function, instance, supported)
            functools.update_wrapper(call, function)
            call.__signature__ = signature
            return call if wrap is None else wrap(call)

        described: ComposedOp[P, R] = ComposedOp(implementation(passes, reference_kernel), **description)
        described.implementation = implementation
        return described

    return describe


def _accept(*tensors: Any) -> None:
    """Decline nothing."""
