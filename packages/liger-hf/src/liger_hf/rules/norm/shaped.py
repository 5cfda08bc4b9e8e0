# SPDX-License-Identifier: Apache-2.0
"""Norms that do not normalize the last dimension of their input, written with the ops; the rule is in rule.py.

groups of channels    (samples, channels, …), as nn.GroupNorm
channels first        (samples, channels, height, width), each position over its channels
each head             (batch, tokens, heads, width) → (batch, tokens, heads · width), with one weight for all of them
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from liger_core import Op, group_norm, layer_norm, rms_norm


class NormForm(NamedTuple):
    """One kind of norm.

    shape  maps a number of positions to the shape of one sample
    ways   possible computations: an op, its description, and a function of the module and x that calls it
    """

    name: str
    shape: Callable[[int], tuple[int, ...]]
    ways: tuple[tuple[Op[..., Any], str, Callable[[Any, Tensor], Tensor]], ...]


def form_of(module: nn.Module, weights: dict[str, nn.Parameter], eps: str) -> NormForm | None:
    """Return the form of a norm, according to its attributes; None if it normalizes the last dimension."""
    channels, heads, head_dim = (getattr(module, name, None) for name in ("num_channels", "num_heads", "head_dim"))
    width = max((p.shape[0] for p in weights.values()), default=None)
    if isinstance(getattr(module, "num_groups", None), int) and isinstance(channels, int):
        return NormForm("group_norm", lambda n: (channels, n), ((group_norm, "", partial(_groups, eps=eps)),))
    if getattr(module, "data_format", None) == "channels_first" and width:
        ways = ((layer_norm, "channels first", partial(_channels_first, eps=eps)),)
        return NormForm("layer_norm", lambda n: (width, 2, n), ways)
    if isinstance(heads, int) and isinstance(head_dim, int) and width == heads * head_dim:
        both = ((layer_norm, "of each head"), (rms_norm, "of each head"))
        return NormForm(
            "layer_norm",
            lambda n: (n, heads, head_dim),
            tuple((op, words, partial(_heads, op=op, eps=eps)) for op, words in both),
        )
    return None


def _groups(module: Any, x: Tensor, *, eps: str) -> Tensor:
    return group_norm(x, module.num_groups, module.weight, module.bias, getattr(module, eps))


def _channels_first(module: Any, x: Tensor, *, eps: str) -> Tensor:
    rows = x.movedim(1, -1)
    return layer_norm(rows, module.weight, getattr(module, "bias", None), getattr(module, eps)).movedim(-1, 1)


def _heads(module: Any, x: Tensor, *, op: Any, eps: str) -> Tensor:
    y = op(x, eps=getattr(module, eps)).flatten(-2) * module.weight
    return y if getattr(module, "bias", None) is None else y + module.bias
