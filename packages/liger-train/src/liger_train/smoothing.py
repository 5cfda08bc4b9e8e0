# SPDX-License-Identifier: Apache-2.0
"""`--set label_smoothing_factor`: label smoothing in the loss function of the model, which a fused head computes
without the logits."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_hf.private_transformers import ForCausalLMLoss
from liger_hf.rules.head.causal_loss import causal_lm_loss
from liger_train import fields
from liger_train.setup import Setup

FIELD = "label_smoothing_factor"


def factor_of(setup: Setup) -> float:
    """Return the label smoothing factor of a setup, 0 if it sets none."""
    return float(fields.values(setup.set).get(FIELD, 0.0)) if FIELD in fields.strings(setup.set) else 0.0


def smooth(model: nn.Module, setup: Setup, notes: list[str]) -> None:
    """Make a model compute the smoothed loss itself, or note that the Trainer computes it from the logits of the whole
    batch."""
    if not (factor := factor_of(setup)):
        return
    base = _with_loss(model)
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    if (
        base.loss_function in (ForCausalLMLoss, causal_lm_loss)
        and code is not None
        and "loss_function" in code.co_names
    ):
        base.loss_function = partial(smoothed_loss, factor)
    else:
        notes.append(
            f"--set {FIELD}: Transformers computes the loss from the logits of the whole batch, since "
            f"{type(base).__name__} computes its own loss."
        )


def is_smoothed(model: nn.Module) -> bool:
    """Whether the model computes the smoothed loss itself."""
    return getattr(_with_loss(model).loss_function, "func", None) is smoothed_loss


def _with_loss(model: nn.Module) -> PreTrainedModel:
    """Return the model within adapters; Transformers warns where a loss function is read of one without an LM head."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def smoothed_loss(
    factor: float,
    logits: Any,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The loss of Transformers' LabelSmoother: (1 - factor) · (-log p of the label) + factor · (the mean of -log p over
    all classes).

    It is the mean over labels that are not ignored, or their sum over num_items_in_batch.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.to(logits.device).reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(
        logits.float().view(-1, vocab_size),
        target,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=factor,
    )
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
