# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy in Triton: core's chunk loop, cuBLAS products, and the row passes here."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from liger_core.ops.linear_cross_entropy import fused
from liger_triton._softmax_loss import TritonPasses
from liger_triton.launch import TritonKernel, supported


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    normalizer: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    accumulate_dtype: torch.dtype | None = None,
    chunk: int | Literal["report"] | None = None,
    budget: int | None = None,
    pack: bool = True,
    main_grad: Tensor | None = None,
    return_metrics: bool = False,
) -> Any:
    supported(hidden, weight)
    return _fused(
        hidden,
        weight,
        target,
        bias=bias,
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        normalizer=normalizer,
        token_weight=token_weight,
        accumulate_dtype=accumulate_dtype,
        chunk=chunk,
        budget=budget,
        pack=pack,
        main_grad=main_grad,
        return_metrics=return_metrics,
    )


_fused = fused(TritonPasses(), TritonKernel)
