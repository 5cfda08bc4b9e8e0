# SPDX-License-Identifier: Apache-2.0
"""`--set label_smoothing_factor`: label smoothing in the model's loss, for a fused head without full logits."""

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
    """Return the label smoothing factor of a setup, or 0."""
    return float(fields.values(setup.set).get(FIELD, 0.0)) if FIELD in fields.strings(setup.set) else 0.0


def smooth(model: nn.Module, setup: Setup, notes: list[str]) -> None:
    """Make a model compute the smoothed loss itself, or note that the Trainer computes it from the full logits."""
    if not (factor := factor_of(setup)):
        return
    base = _outermost_pretrained(model)
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
    """Return whether the model computes the smoothed loss itself."""
    return getattr(_outermost_pretrained(model).loss_function, "func", None) is smoothed_loss


def _outermost_pretrained(model: nn.Module) -> PreTrainedModel:
    """Return the Transformers model inside any adapters; reading the loss function of an inner model would warn."""
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
    """Compute the loss of Transformers' LabelSmoother: the mean over the labels, or their sum / num_items_in_batch.

        loss = (1 - factor) · -log p[label] + factor · mean(-log p)          (the mean over all classes)

    Ignored labels do not count.
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
