# SPDX-License-Identifier: Apache-2.0
"""Norms that do not normalize the last dimension of their input, written with the ops; the rule is in rule.py.

groups of channels    (samples, channels, …), as nn.GroupNorm
channels first        (samples, channels, height, width), each position over its channels
each head             (batch, tokens, heads, width) → (batch, tokens, heads · width), with one weight for all of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_core import Op, group_norm, layer_norm, rms_norm
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, of_length, replica, trial


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


def cases(
    module: nn.Module,
    form: NormForm,
    weights: dict[str, nn.Parameter],
    device: torch.device,
    dtypes: Iterable[torch.dtype],
) -> Iterator[Case]:
    """Yield cases with small samples, which reveal where eps is added, and large ones, which reveal limits."""
    draw = Draw(device)
    values = {name: draw.positive(p.shape[0]) for name, p in weights.items()}
    scales = torch.tensor([0.01, 1.0, 100.0], device=device)
    shape = form.shape(7)
    x, upstream = draw.normal(3, *shape) * scales.view(3, *[1] * len(shape)), draw.normal(3, *shape)
    for dtype in dtypes:
        cast_values = {name: v.to(dtype) for name, v in values.items()}
        yield Case(str(dtype).removeprefix("torch."), dtype, _run(module, x.to(dtype), upstream.to(dtype), cast_values))
    for length in LENGTHS:
        x, upstream = draw.normal(1, *form.shape(length)), draw.normal(1, *form.shape(length))
        yield of_length(length, torch.float32, _run(module, x, upstream, values))


def _run(module: nn.Module, x: Tensor, upstream: Tensor, weights: dict[str, Tensor]) -> Run:
    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        y = function(replica(module, parameters=weights), inputs["x"])
        # The heads of a row may be merged into one dimension.
        return {"output": y.view_as(x) if y.numel() == x.numel() and y.dim() < x.dim() else y}

    return trial(call, {"x": x}, {"output": upstream}, weights)
