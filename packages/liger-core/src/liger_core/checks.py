# SPDX-License-Identifier: Apache-2.0
"""The checks that ops share, each with its sentence. None reads device values, except on the CPU where that is free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from liger_core.errors import DeviceError, DtypeError, LigerError, OptionError, ShapeError, TargetError


def shape(tensor: Tensor) -> str:
    """The shape as a plain tuple, for messages."""
    return str(tuple(tensor.shape))


def fail(error: type[LigerError], op: str, sentence: str) -> NoReturn:
    raise error(f"{op}: {sentence}")


def floating(op: str, **tensors: Tensor | None) -> None:
    """Every tensor must be a floating-point tensor, and live where the first one does."""
    first, device = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            fail(DtypeError, op, f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            fail(DtypeError, op, f"{name} must have a floating dtype, got {tensor.dtype}")
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            fail(DeviceError, op, f"{name} must be on {device} like {first}, got {tensor.device}")


def same_device(op: str, first: str, anchor: Tensor, **tensors: Tensor | None) -> None:
    """Every tensor must live where the first one does."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != anchor.device:
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


def positive(op: str, name: str, value: float, because: str = "") -> None:
    if isinstance(value, (int, float)) and not value > 0:
        fail(OptionError, op, f"{name} must be > 0{because}, got {value}")


def choice(op: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        fail(OptionError, op, f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def constant(op: str, **tensors: Any) -> None:
    """The op has no gradient for these; one that asks for it would stay silently untrained."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            fail(OptionError, op, f"{name} must not require a gradient, since the op does not define one; pass {name}.detach()")


def distributed(op: str, arguments: Mapping[str, Any], problem: Exception) -> None:
    """Say what to do about a call that failed because of DTensors; looked at only then, so that other calls pay nothing."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    spread = [name for name, value in tensors.items() if hasattr(value, "full_tensor")]
    plain = [name for name in tensors if name not in spread]
    if not spread or not ("DTensor" in str(problem) or "sharding strategy" in str(problem)):
        return
    if plain:
        sentence = (
            f"tensors must all be DTensors or all be plain, got {', '.join(spread)} as DTensor and {', '.join(plain)} as plain; "
            f"distribute {', '.join(plain)} over the same mesh with distribute_tensor, or pass local tensors with .to_local()"
        )
    else:
        sentence = (
            f"tensors must be plain, since the op does not support DTensor yet, got {', '.join(spread)} as DTensor; "
            "pass whole tensors with .full_tensor(), or local ones with .to_local() where each rank can compute its part alone"
        )
    raise DeviceError(f"{op}: {sentence}") from problem


def targets(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """On the CPU, out-of-range targets are an error; on a device they are not looked at (the loss is then NaN)."""
    if type(target) is not Tensor or target.device.type != "cpu" or torch.compiler.is_compiling() or target.numel() == 0:
        return
    if torch._C._len_torch_dispatch_stack():
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(wrong.any()):
        value = int(target[wrong][0])
        fail(TargetError, op, f"every target must be in [0, {classes}) or ignore_index={ignore_index}, got {value}")
