# SPDX-License-Identifier: Apache-2.0
"""The argument checks that ops share. They read values only on the CPU, where that is free."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from liger_core.errors import DeviceError, DtypeError, LigerError, OptionError, ShapeError, TargetError
from liger_core.private_torch import dispatch_stack_length, is_wrapped

# Where an RMS norm rounds the scaled row: before it multiplies it by the weight, or only after that.
Cast = Literal["input", "float32"]


def shape(tensor: Tensor) -> str:
    """Return the shape as a plain tuple, for messages."""
    return str(tuple(tensor.shape))


def fail(error: type[LigerError], op: str, sentence: str) -> NoReturn:
    raise error(f"{op}: {sentence}")


def tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        _no_tensor(op, name, value)


def _no_tensor(op: str, name: str, value: Any) -> NoReturn:
    fail(DtypeError, op, f"{name} must be a tensor, got {type(value).__name__}")


def _elsewhere(op: str, name: str, value: Tensor, first: str, device: torch.device) -> NoReturn:
    fail(DeviceError, op, f"{name} must be on {device} like {first}, got {value.device}")


def floating(op: str, required: int = 1, /, **tensors: Tensor | None) -> None:
    """Check that tensors have floating dtypes and one device; all but the first `required` may be None."""
    first, device = "", None
    for name, value in tensors.items():
        if value is None and required <= 0:
            continue
        required -= 1
        if not isinstance(value, Tensor):
            _no_tensor(op, name, value)
        if not value.is_floating_point():
            fail(DtypeError, op, f"{name} must have a floating dtype, got {value.dtype}")
        if device is None:
            first, device = name, value.device
        elif value.device != device:
            _elsewhere(op, name, value, first, device)


def same_device(op: str, first: str, anchor: Tensor, **optional: Tensor | None) -> None:
    """Check that every tensor, if not None, is on the device of the first."""
    for name, value in optional.items():
        if value is None:
            continue
        tensor(op, name, value)
        if value.device != anchor.device:
            _elsewhere(op, name, value, first, anchor.device)


def same_dtype(op: str, first: str, anchor: Tensor, **tensors: Tensor | None) -> None:
    """Check that every tensor, if not None, has the dtype of the first; nothing is cast silently."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != anchor.dtype:
            wanted = f"{anchor.dtype} like {first}"
            fail(DtypeError, op, f"{name} must have dtype {wanted}, got {tensor.dtype}; cast one of them")


def vector(op: str, name: str, tensor: Tensor | None, width: int, of: str, anchor: Tensor) -> None:
    """Check that a tensor, if not None, has shape (width,), to match the last dimension of another."""
    if tensor is not None and tensor.shape != (width,):
        mismatch(op, name, tensor, (width,), of, anchor)


def mismatch(op: str, name: str, tensor: Tensor, wanted: object, of: str, anchor: Tensor) -> NoReturn:
    """Fail for a tensor whose shape does not match another one."""
    misshapen(op, f"{name} must have shape {wanted} to match {of} {shape(anchor)}", tensor)


def unlike(op: str, name: str, tensor: Tensor, first: str, anchor: Tensor, advice: str = "") -> NoReturn:
    """Fail for a tensor that does not have the shape of the first."""
    misshapen(op, f"{name} must have the shape of {first} {shape(anchor)}", tensor, advice)


def misshapen(op: str, sentence: str, tensor: Tensor, advice: str = "") -> NoReturn:
    """Fail for a tensor whose shape is not what the sentence says."""
    fail(ShapeError, op, f"{sentence}, got {shape(tensor)}{advice}")


def at_least_one_dimension(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dim() == 0:
        fail(ShapeError, op, f"{name} must have at least one dimension, got a scalar")


def finite(op: str, name: str, value: Any) -> None:
    """Check that an option is a finite number. Test for None first."""
    if not (type(value) is float and -math.inf < value < math.inf):
        _number(op, name, value, "", lambda number: True)


def positive(op: str, name: str, value: Any, because: str = "") -> None:
    """Check that an option is a finite number > 0. Test for None first."""
    if not (type(value) is float and 0.0 < value < math.inf):
        _number(op, name, value, f" > 0{because}", lambda number: number > 0)


def not_negative(op: str, name: str, value: Any) -> None:
    """Check that an option is a finite number ≥ 0. Test for None first."""
    if not (type(value) is float and 0.0 <= value < math.inf):
        _number(op, name, value, " ≥ 0", lambda number: number >= 0)


def fraction(op: str, name: str, value: Any) -> None:
    if not (type(value) is float and 0.0 <= value <= 1.0):
        _number(op, name, value, " in [0, 1]", lambda number: 0 <= number <= 1)


def _number(op: str, name: str, value: Any, bounds: str, inside: Callable[[Any], bool]) -> None:
    """Raise OptionError for a value that is not a finite number within its bounds."""
    is_number = isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    if not is_number or not inside(value) or (isinstance(value, float) and not math.isfinite(value)):
        # Printing a tensor would read it from the device.
        got = f"a tensor of shape {shape(value)}" if isinstance(value, Tensor) else repr(value)
        fail(OptionError, op, f"{name} must be a finite number{bounds}, got {got}")


def integer(op: str, name: str, value: Any) -> None:
    """Check that a value is an integer and not a bool."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, (int, torch.SymInt))):
        fail(OptionError, op, f"{name} must be an integer, got {value!r}")


def without_overlap(op: str, name: str, tensor: Tensor) -> None:
    """Check that every element has memory of its own, so that it can be overwritten."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        needed = f"inplace=True needs {name} with memory for every element"
        fail(OptionError, op, f"{needed}, got an expanded tensor; pass {name}.contiguous()")


def choice(op: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        fail(OptionError, op, f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def instance(op: str, name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        fail(OptionError, op, f"{name} must be of type {kind.__name__}, got {value!r}")


def scaling(op: str, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str) -> None:
    """Check the rows of x and the options with which an RMS norm scales them."""
    floating(op, x=x, weight=weight)
    at_least_one_dimension(op, "x", x)
    vector(op, "weight", weight, x.shape[-1], "x", x)
    positive(op, "eps", eps)
    choice(op, "cast", cast, ("input", "float32"))
    if weight_offset != 0.0:
        finite(op, "weight_offset", weight_offset)
    if weight is None and weight_offset != 0.0:
        fail(OptionError, op, f"weight_offset must be 0 without a weight, got {weight_offset}")


def constant(op: str, **tensors: Any) -> None:
    """Refuse tensors that require a gradient the op does not define: they would silently stay untrained."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            because = "since the op does not define one"
            fail(OptionError, op, f"{name} must not require a gradient, {because}; pass {name}.detach()")


def not_plain(op: str, arguments: Mapping[str, Any], problem: Exception) -> None:
    """Raise an error that says what to do if a call failed because of DTensors or quantized tensors."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    # torchao's tensors refuse an operation with their class and "dispatch".
    packed = [
        f"{n} as {kind}"
        for n, t in tensors.items()
        if str(problem).startswith(f"{(kind := type(t).__name__)} dispatch")
    ]
    if packed:
        sentence = f"tensors must be plain, got {', '.join(packed)}; pass what its dequantize() returns"
        raise DtypeError(f"{op}: {sentence}") from problem
    spread = [name for name, value in tensors.items() if hasattr(value, "full_tensor")]
    plain = [name for name in tensors if name not in spread]
    if not spread or not ("DTensor" in str(problem) or "sharding strategy" in str(problem)):
        return
    if plain:
        mixed(op, spread, plain, problem)
    raise DeviceError(
        f"{op}: tensors must be plain, since the op does not support DTensor yet, got {', '.join(spread)} as DTensor; "
        "pass whole tensors with .full_tensor() (grad_placements=[Partial()] where ranks have rows of their own), "
        "or local ones with .to_local() where each rank can compute its part alone"
    ) from problem


def mixed(op: str, spread: list[str], plain: list[str], problem: Exception | None = None) -> NoReturn:
    """Raise DeviceError for DTensors beside plain tensors, with their names."""
    raise DeviceError(
        f"{op}: tensors must all be DTensors or all be plain, got {', '.join(spread)} as DTensor and "
        f"{', '.join(plain)} as plain; distribute {', '.join(plain)} over the same mesh with distribute_tensor, or "
        "pass local tensors with .to_local()"
    ) from problem


def readable(tensor: Tensor) -> bool:
    """Whether values can be read without waiting: on the CPU, and neither traced nor batched by a transform."""
    if (
        type(tensor) is not Tensor
        or tensor.device.type != "cpu"
        or torch.compiler.is_compiling()
        or tensor.numel() == 0
    ):
        return False
    return not (dispatch_stack_length() or is_wrapped(tensor))


def targets(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Check the range of targets on the CPU. Other devices are not read; out of range, the loss is NaN there."""
    integer(op, "ignore_index", ignore_index)
    if not readable(target):
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(wrong.any()):
        value = int(target[wrong][0])
        fail(TargetError, op, f"every target must be in [0, {classes}) or ignore_index={ignore_index}, got {value}")
