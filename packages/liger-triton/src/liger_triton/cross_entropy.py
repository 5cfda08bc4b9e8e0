# SPDX-License-Identifier: Apache-2.0
"""cross_entropy in Triton: core's reduction over the row passes here."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from liger_core.ops.cross_entropy import losses, reduced
from liger_triton._softmax_loss import TritonPasses
from liger_triton.launch import TritonKernel, supported


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    normalizer: Tensor | float | None = None,
    return_metrics: bool = False,
) -> Any:
    supported(logits)
    return reduced(_losses, logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, reduction, normalizer, return_metrics)


_losses = losses(TritonPasses(), TritonKernel)
