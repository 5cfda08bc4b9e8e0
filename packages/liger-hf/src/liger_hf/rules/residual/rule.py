# SPDX-License-Identifier: Apache-2.0
"""Residual and norm in one step: a module whose forward adds two tensors and passes the sum straight to a norm of rows.

An instance gets a forward rebuilt from its source (`liger_hf.rules.residual.source`). Every call checks the norm: if it
has hooks, or was wrapped or replaced, as ZeRO-3, accelerate and PEFT do, it is called as a module.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import Op, add_layer_norm, add_rms_norm
from liger_hf.patch import replacing
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.norm import rule as norms
from liger_hf.rules.norm.within import Fusion, fused, refusal, untouched
from liger_hf.rules.residual.source import norms_of_sums, with_one_call
from liger_hf.stand_in import Case, twin_trial

NOTHING = "no forward has the statements `x = a + b; y = self.norm(x)` or `y = self.norm(a + b)`, with {} as norm"


def _plain(forward: Callable[..., Any], child: nn.Module, left: Any, right: Any) -> tuple[Any, Any]:
    summed = left + right
    return forward(child, summed), summed


# A norm of the sum of two tensors: (the norm's module, left, right) → (normed, sum).
AddNorm = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]


def _candidates(original: Any, names: tuple[str, ...], child: nn.Module, op: str) -> Iterator[Candidate]:
    eps = norms.eps_of(child)
    assert eps is not None
    forward = type(child).forward
    if op == "add_rms_norm":
        for cast, offset in norms.CONVENTIONS:
            words, step = f"weight_offset={offset:g}, cast={cast!r}", partial(_rms, eps=eps, cast=cast, offset=offset)
            yield _candidate(add_rms_norm, words, original, names, forward, step)
    else:
        for words, offset in (("", 0.0), ("weight + 1", 1.0)):
            step = partial(_layer, eps=eps, offset=offset)
            yield _candidate(add_layer_norm, words, original, names, forward, step)


def _rms(child: Any, left: Tensor, right: Tensor, *, eps: str, cast: Any, offset: float) -> tuple[Tensor, Tensor]:
    weight = getattr(child, "weight", None)
    # In the order of the sum: the results get the memory layout of the first summand, which Inkling's views need.
    return add_rms_norm(
        left, right, weight, getattr(child, eps), weight_offset=0.0 if weight is None else offset, cast=cast
    )


def _layer(child: Any, left: Tensor, right: Tensor, *, eps: str, offset: float) -> tuple[Tensor, Tensor]:
    weight = getattr(child, "weight", None)
    if offset and weight is not None:
        weight = weight + offset
    return add_layer_norm(left, right, weight, getattr(child, "bias", None), getattr(child, eps))


def _candidate(
    op: Op[..., Any], words: str, original: Any, names: tuple[str, ...], forward: Callable[..., Any], step: AddNorm
) -> Candidate:
    layer = op is add_layer_norm

    def add_norm(child: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if untouched(child, forward) and _fit(getattr(child, "weight", None), left, right, layer):
            return step(child, left, right)
        return _plain(nn.Module.__call__, child, left, right)

    return Candidate(op, words, step, replacing(original, lambda: with_one_call(original, names, add_norm)))


def _fit(weight: Any, left: Any, right: Any, layer: bool) -> bool:
    """Return whether the sum needs no broadcasting or type promotion.

    Mixed dtypes do not fit, because classes treat them differently; nor does autocast, which promotes a layer norm.
    """
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return False
    if layer and torch.is_autocast_enabled(left.device.type):
        return False
    return left.shape == right.shape and left.dtype == right.dtype and (weight is None or weight.dtype == left.dtype)


def _cases(child: nn.Module, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    for drawn in norms.inputs(child, device, dtypes):
        # Upstream gradients that differ.
        upstream = {"norm of the sum": drawn.upstream, "sum": drawn.upstream.flip(-1)}
        yield drawn.case(twin_trial(child, {"left": drawn.x, "right": drawn.upstream}, upstream, drawn.values))


FUSION = Fusion(
    norms_of_sums,
    "+",
    "the norms after its sums",
    "sums before its norms are left alone",
    _plain,
    _candidates,
    _cases,
    refusal,
)


def look(module: nn.Module, norm: str = "rms_norm") -> Found | None:
    """Return the findings for a module that adds two tensors and normalizes the sum by a child."""
    return fused(module, norm, f"add_{norm}", FUSION)


RULE = Rule("residual", look, ("add_rms_norm",), NOTHING.format("an RMSNorm"))
LAYER_NORM = Rule(
    "residual layer norm", partial(look, norm="layer_norm"), ("add_layer_norm",), NOTHING.format("a layer norm")
)
