# SPDX-License-Identifier: Apache-2.0
"""The checks that ops share, each with its sentence. None reads device values, except on the CPU where that is free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from liger_core.errors import DeviceError, DtypeError, LigerError, OptionError, ShapeError, TargetError


def shape(tensor: Tensor) -> str:
    """The shape as a plain tuple, for messages."""
    return str(tuple(tensor.shape))


def fail(error: type[LigerError], op: str, sentence: str) -> NoReturn:
    raise error(f"{op}: {sentence}")


def tensors(op: str, **values: Any) -> None:
    """Every value must be a tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            fail(DtypeError, op, f"{name} must be a tensor, got {type(value).__name__}")


def floating(op: str, optional: Mapping[str, Tensor | None] | None = None, **required: Tensor) -> None:
    """Every tensor, and every optional one that is given, must be a floating-point tensor on the device of the first."""
    first, device = "", None
    for name, tensor in (required if optional is None else {**required, **optional}).items():
        if tensor is None and name not in required:
            continue
        if not isinstance(tensor, Tensor):
            fail(DtypeError, op, f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            fail(DtypeError, op, f"{name} must have a floating dtype, got {tensor.dtype}")
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            fail(DeviceError, op, f"{name} must be on {device} like {first}, got {tensor.device}")


def same_device(op: str, first: str, anchor: Tensor, **optional: Tensor | None) -> None:
    """Every tensor that is given must be on the device of the first."""
    for name, tensor in optional.items():
        if tensor is None:
            continue
        tensors(op, **{name: tensor})
        if tensor.device != anchor.device:
            fail(DeviceError, op, f"{name} must be on {anchor.device} like {first}, got {tensor.device}")


def same_dtype(op: str, first: str, anchor: Tensor, **tensors: Tensor | None) -> None:
    """Every tensor must have the dtype of the first one; nothing is cast silently."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != anchor.dtype:
            fail(DtypeError, op, f"{name} must have dtype {anchor.dtype} like {first}, got {tensor.dtype}; cast one of them")


def vector(op: str, name: str, tensor: Tensor | None, width: int, of: str, anchor: Tensor) -> None:
    """The tensor must be (width,), to match the last dimension of another."""
    if tensor is not None and tensor.shape != (width,):
        fail(ShapeError, op, f"{name} must have shape ({width},) to match {of} {shape(anchor)}, got {shape(tensor)}")


def at_least_one_dimension(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dim() == 0:
        fail(ShapeError, op, f"{name} must have at least one dimension, got a scalar")


def number(op: str, name: str, value: Any, bounds: str = "", because: str = "") -> None:
    """The value must be a finite number, and if bounds say so > 0, ≥ 0 or in [0, 1]."""
    if type(value) in (float, int) or (isinstance(value, NUMBERS) and not isinstance(value, bool)):
        inside = _BOUNDS[bounds](value)
        if inside and (not isinstance(value, float) or math.isfinite(value)):
            return
    fail(OptionError, op, f"{name} must be a finite number{' ' if bounds else ''}{bounds}{because}, got {value!r}")


NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_BOUNDS: dict[str, Callable[[Any], bool]] = {
    "": lambda value: True,
    "> 0": lambda value: value > 0,
    "≥ 0": lambda value: value >= 0,
    "in [0, 1]": lambda value: 0 <= value <= 1,
}


def integer(op: str, name: str, value: Any) -> None:
    """The value must be an integer, and no bool."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, (int, torch.SymInt))):
        fail(OptionError, op, f"{name} must be an integer, got {value!r}")


def without_overlap(op: str, name: str, tensor: Tensor) -> None:
    """Every element must have memory of its own, so that it can be written."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        fail(OptionError, op, f"inplace=True needs {name} with memory for every element, got an expanded tensor; pass {name}.contiguous()")


def choice(op: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        fail(OptionError, op, f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def constant(op: str, **tensors: Any) -> None:
    """The op has no gradient for these; one that asks for it would stay silently untrained."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            fail(OptionError, op, f"{name} must not require a gradient, since the op does not define one; pass {name}.detach()")


def targets(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """On the CPU, out-of-range targets are an error; on a device they are not looked at (the loss is then NaN)."""
    integer(op, "ignore_index", ignore_index)
    if type(target) is not Tensor or target.device.type != "cpu" or torch.compiler.is_compiling() or target.numel() == 0:
        return
    # Neither do transforms: the values of a batched target differ from sample to sample.
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.is_functorch_wrapped_tensor(target):
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(wrong.any()):
        value = int(target[wrong][0])
        fail(TargetError, op, f"every target must be in [0, {classes}) or ignore_index={ignore_index}, got {value}")
