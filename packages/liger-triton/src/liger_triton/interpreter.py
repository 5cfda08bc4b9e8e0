# SPDX-License-Identifier: Apache-2.0
"""Patches that make Triton's interpreter compute as the hardware does, and call functions in half the time."""

import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def round_to_nearest() -> None:
    """Make casts to bfloat16 round to nearest even, not toward zero as in the interpreter (Triton 3.6 to 3.9)."""
    builder: Any = interpreter.InterpreterBuilder
    truncating = builder.cast_impl

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return truncating(self, source, dtype)
        return interpreter.TensorHandle(_nearest(source.data), dtype.scalar)

    builder.cast_impl = cast_impl


def _nearest(values: Any) -> Any:
    """Return the upper 16 bits of float32 values after rounding to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


def multiply_bfloat16() -> None:
    """Make tl.dot read bfloat16 operands as numbers, not as integers as in the interpreter (Triton 3.6 to 3.9)."""
    builder: Any = interpreter.InterpreterBuilder
    inner = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return inner(self, _widened(a), _widened(b), *rest)

    builder.create_dot = create_dot


def _widened(operand: Any) -> Any:
    """Convert to float32, which holds every product of two bfloat16 numbers exactly."""
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def round_once() -> None:
    """Make tl.fma round once; the interpreter (Triton 3.6 to 3.9) rounds the product, too."""
    builder: Any = interpreter.InterpreterBuilder
    inner = builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if x.dtype.scalar != tl.float32:
            return inner(self, x, y, z)
        # float64 holds the product exactly.
        wide = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(wide.astype(np.float32), x.dtype.scalar)

    builder.create_fma = create_fma


def narrow_floats() -> None:
    """Pass floats to kernels in float32, as on a GPU, not in float64 as the interpreter does (Triton 3.6 to 3.9)."""
    inner: Any = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if not isinstance(argument, float):
            return inner(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = convert


def ignore_nan() -> None:
    """Make tl.minimum and tl.maximum ignore NaN, as on a GPU; the interpreter (Triton 3.6 to 3.9) returns it."""
    builder: Any = interpreter.InterpreterBuilder
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)


def compare_to_booleans() -> None:
    """Give a comparison the dtype int1: the interpreter (Triton 3.6 to 3.9) gives it that of its operands.

    Casts and splats read the data by that dtype, and Triton 3.9 refuses such a mask.
    """
    builder: Any = interpreter.InterpreterBuilder
    inner = builder.binary_op

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        result = inner(self, left, right, op)
        return interpreter.TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    builder.binary_op = binary_op


def find_builtins_once() -> None:
    """Cache the builtins that the interpreter replaces; it searches all of triton.language in every call."""
    if not hasattr(interpreter, "_patch_builtin"):
        return

    @cache
    def builtins_of(namespace: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member)]

    def patch(namespace: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(namespace):
            member = getattr(namespace, name)
            # Either all of them or none are replaced already.
            if not tl.core.is_builtin(member):
                return
            interpreter._patch_attr(namespace, name, member, builder, scope)

    interpreter._patch_builtin = patch
