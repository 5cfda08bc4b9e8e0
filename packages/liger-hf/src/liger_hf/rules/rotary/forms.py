# SPDX-License-Identifier: Apache-2.0
"""The forms of rotary functions, and the call of `rope` that computes each of them.

A function is recognized by the names of its parameters: one tensor or two, then cos and sin in either order, or one
complex table of angles. Its form is found by trial; the forms below are those in Transformers.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import rope


@dataclass(frozen=True)
class Signature:
    """The parameters of a rotary function.

    rotated  names of the parameters that are rotated
    tables   names of the parameters that hold the angles
    heads    the default axis of the heads; None if there is no parameter `unsqueeze_dim` for it
    """

    names: tuple[str, ...]
    rotated: tuple[str, ...]
    tables: tuple[str, ...]
    heads: int | None


def signature(function: Callable[..., Any]) -> Signature | None:
    """Return the signature of a rotary function of queries and keys; None if the function does not look like one."""
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters.values()):
        return None
    tables = next((tables for tables in (("cos", "sin"), ("freqs_cis",)) if set(tables) <= set(names)), None)
    first = min(map(names.index, tables)) if tables else 0
    if tables is None or first not in (1, 2) or not set(names[first:]) <= {*tables, "position_ids", "unsqueeze_dim"}:
        return None
    axis = parameters.get("unsqueeze_dim")
    if axis is not None and axis.default not in (1, 2):
        return None
    return Signature(names, names[:first], tables, None if axis is None else axis.default)


@dataclass(frozen=True)
class Form:
    """One way to write the rotation.

    interleaved  whether neighboring columns are a pair
    table        converts each of the function's tables to the cos or sin of `rope`
    turned       whether it rotates the other way
    gathers      whether pairs are neighboring columns in the input, and halves of the columns in the output
    trailing     whether the last columns are rotated, not the first
    heads        the axis of the heads if no argument gives it
    """

    name: str
    interleaved: bool
    table: Callable[[Tensor], Tensor] = lambda table: table
    turned: bool = False
    gathers: bool = False
    trailing: bool = False
    heads: int = 1


def forms(signature: Signature) -> Iterator[Form]:
    """Yield the forms that a function with this signature may have, the simplest first."""
    known = [
        Form("", False),
        Form("interleaved=True", True),
        Form("interleaved=True, first half of the tables", True, lambda table: _repeated(_half(table))),
        Form("interleaved=True, half a table", True, _repeated),
        Form("interleaved=True, half a table, last columns", True, _repeated, trailing=True),
        Form("half a table", False, _twice),
        Form("turned the other way", False, turned=True),
        Form("from pairs to halves", False, lambda table: _twice(_half(table)), gathers=True),
    ]
    if len(signature.tables) == 1:
        known = [Form("complex", True, _repeated)]
    for axis in (1, 2) if signature.heads is None else (signature.heads,):
        yield from (replace(form, heads=axis) for form in known)


@dataclass(frozen=True)
class Coverage:
    """The calls for which a form was verified.

    fractions    widths of the tables, as fractions of the head dimension
    keeps_dtype  whether the result has the dtype of the rotated tensors even if the tables have another
    flat         for tables of shape (tokens, columns): the number of dimensions of the rotated tensors, and the axis of
                 the heads, counted with a batch dimension
    """

    fractions: frozenset[float]
    keeps_dtype: bool
    flat: frozenset[tuple[int, int]] = frozenset()

    def covers(self, fraction: float) -> bool:
        """Return whether tables of this width were verified.

        If two widths work, the smaller leaves the remaining columns unchanged. Then any smaller width works, too.
        """
        return fraction in self.fractions or (len(self.fractions) > 1 and fraction < max(self.fractions))


class RotaryCall(NamedTuple):
    """The arguments of a call, as `rope` takes them: states of shape (batch, heads, tokens, width), cos and sin.

    transposed  whether the function's heads are on axis 2
    packed      whether the function's tensors have no batch dimension, with sequences or images one after another
    """

    states: list[Tensor]
    cos: Tensor
    sin: Tensor
    transposed: bool
    packed: bool


def with_rope(signature: Signature, form: Form, original: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    """Return a function with the original's signature that calls `rope`, or the original where `rope` cannot."""

    def apply_rotary(*args: Any, **options: Any) -> Any:
        call = read(signature, form, coverage, args, options)
        if call is None:
            return original(*args, **options)
        return returned(_rotated(call.states, call.cos, call.sin, form), call)

    return apply_rotary


def read(
    signature: Signature, form: Form, coverage: Coverage, args: tuple[Any, ...], options: dict[str, Any]
) -> RotaryCall | None:
    """Return the arguments of a call as `rope` takes them; None if it cannot."""
    kwargs = dict(zip(signature.names, args, strict=False)) | options
    states: list[Any] = [kwargs.get(name) for name in signature.rotated]
    tables: list[Any] = [kwargs.get(name) for name in signature.tables]
    axis = kwargs.get("unsqueeze_dim", form.heads)
    if kwargs.get("position_ids") is not None or any(value is None for value in (*states, *tables)):
        return None
    packed = False
    if tables[0].dim() == 2:
        # Without a batch dimension, unsqueeze_dim is one less than the axis of the heads.
        axis = axis if signature.heads is None else axis + 1
        if (states[0].dim(), axis) not in coverage.flat:
            return None
        packed = states[0].dim() == 3
    states = [s[None] if packed else s for s in states]
    if not _takes(states, tables, axis, coverage):
        return None
    tables = [tables[0].real, tables[0].imag] if tables[0].is_complex() else tables
    cos, sin = [form.table(table) for table in tables]
    states = [s.transpose(1, 2) if axis == 2 else s for s in states]
    return RotaryCall(states, cos, -sin if form.turned else sin, axis == 2, packed)


def returned(rotated: Sequence[Tensor], call: RotaryCall) -> Any:
    """Return the results of `rope` in the layout of the function."""
    rotated = [r.transpose(1, 2) for r in rotated] if call.transposed else rotated
    rotated = [r[0] for r in rotated] if call.packed else rotated
    return tuple(rotated) if len(rotated) == 2 else rotated[0]


def _takes(states: list[Any], tables: list[Any], axis: Any, coverage: Coverage) -> bool:
    if axis not in (1, 2) or any(t.dim() not in (2, 3) or t.requires_grad for t in tables):
        return False
    if any(s.dim() != 4 or s.dtype != states[0].dtype for s in states):
        return False
    if any(
        s.shape[0] != states[0].shape[0] or s.shape[3] != states[0].shape[3] or s.shape[3 - axis] != tables[0].shape[-2]
        for s in states
    ):
        return False
    if not coverage.covers(tables[0].shape[-1] / states[0].shape[3]):
        return False
    # Tables of another dtype promote the result, unless autocast rounds it in the attention anyway.
    return (
        coverage.keeps_dtype
        or tables[0].is_complex()
        or tables[0].dtype == states[0].dtype
        or torch.is_autocast_enabled(states[0].device.type)
    )


def _rotated(states: list[Any], cos: Tensor, sin: Tensor, form: Form) -> list[Any]:
    if form.trailing and cos.shape[-1] < states[0].shape[-1]:
        unrotated = [s[..., : -cos.shape[-1]] for s in states]
        turned = _rotated([s[..., -cos.shape[-1] :] for s in states], cos, sin, form)
        return [torch.cat(parts, dim=-1) for parts in zip(unrotated, turned, strict=True)]
    if form.gathers:
        states = [s.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for s in states]
    q, k = states[0], states[-1]
    if len(states) == 2 and k.shape[1] and q.shape[1] % k.shape[1] == 0:
        return list(rope(q, k, cos, sin, interleaved=form.interleaved))
    return [_alone(x, cos, sin, form) for x in states]


def _alone(x: Tensor, cos: Tensor, sin: Tensor, form: Form) -> Tensor:
    """Rotate one tensor. `rope` takes two, so the first head also serves as the key, whose result is dropped."""
    return rope(x, x[:, :1].detach(), cos, sin, interleaved=form.interleaved)[0]


def _twice(table: Tensor) -> Tensor:
    return torch.cat((table, table), dim=-1)


def _repeated(table: Tensor) -> Tensor:
    return table.repeat_interleave(2, dim=-1)


def _half(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2]
