# SPDX-License-Identifier: Apache-2.0
"""cut-cross-entropy 25.1.1, with its defaults and without its gradient filter.

By default it omits blocks of small probabilities, which causes its gradient error; `exact` keeps them. With
CCE_AUTOTUNE=1 in the environment, it searches for tile sizes in the first call, which takes minutes.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_bench.peers import Peer, missing
from liger_core.errors import Unsupported


def unavailable(device: torch.device) -> str | None:
    reason = missing("cut_cross_entropy", "cut-cross-entropy==25.1.1")
    return reason or ("its kernels need a CUDA GPU" if device.type != "cuda" else None)


def peers() -> list[Peer]:
    return [
        Peer("cut-cross-entropy", {"linear_cross_entropy": _filtering("high")}),
        Peer("cut-cross-entropy exact", {"linear_cross_entropy": _filtering(None)}),
    ]


def _filtering(filter_eps: str | None) -> Callable[..., Any]:
    package = importlib.import_module("cut_cross_entropy")

    def linear_cross_entropy(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: str = "mean",
    ) -> Any:
        if hidden.dtype == torch.float32:
            raise Unsupported("it takes bfloat16 and float16 only")
        options: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap, "reduction": reduction}
        return package.linear_cross_entropy(hidden, weight, target, **options, filter_eps=filter_eps, impl="cce")

    return linear_cross_entropy
