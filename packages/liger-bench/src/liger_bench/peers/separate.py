# SPDX-License-Identifier: Apache-2.0
"""Ops that combine several others, computed by these others with the backend that a call would get."""

from torch import Tensor

from liger_bench.peers import Peer, by_name
from liger_core import rms_norm, rope
from liger_core.checks import Cast


def peers() -> list[Peer]:
    return [Peer("separate", by_name(add_rms_norm, qk_norm_rope))]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: Cast = "input",
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps, weight_offset=weight_offset, cast=cast), total


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: Cast = "input", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # Normalized before the transpose of heads and tokens, as in a model.
    normed = [
        rms_norm(x.transpose(1, 2), weight, eps, weight_offset=weight_offset, cast=cast).transpose(1, 2)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    return rope(normed[0], normed[1], cos, sin, interleaved=interleaved)
