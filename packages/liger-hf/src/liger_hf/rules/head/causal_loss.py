# SPDX-License-Identifier: Apache-2.0
"""The causal language-model loss of a patched model, computed without logits if possible."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_core import cross_entropy, linear_cross_entropy
from liger_core.private_torch import FakeTensor
from liger_hf.errors import LogitsError
from liger_hf.private_transformers import ForCausalLMLoss, ForMaskedLMLoss
from liger_hf.repeated import checkpointed
from liger_hf.rules.head.call import not_in_a_function, still_valid
from liger_hf.rules.head.lazy_logits import LOSSES, LazyLogits
from liger_hf.rules.head.projection import compute, eager_logits, gathers_itself, in_one_call, replay, scale_and_cap
from liger_hf.rules.head.tensor_parallel import over_classes
from liger_hf.rules.head.weights import HELD, gathered, held

# The logits that a head called as a module computes at a time: enough for large matmuls on a GPU, and about the size
# of a cache on the CPU.
CHUNK_ELEMENTS = {"cpu": 1 << 22}
CHUNK_ELEMENTS_DEVICE = 1 << 28
ATTENTION = F.scaled_dot_product_attention
# The types of a weight without quantization or sharding.
PLAIN_WEIGHTS: tuple[type, ...] = (nn.Parameter, Tensor, FakeTensor)
# The attribute of a head in which `liger plan` says which VocabShard the plain weight stands for.
SHARD = "vocab_shard"


def causal_lm_loss(
    logits: Any,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the cross entropy of each token's logits with the next label: a mean, or a sum over num_items_in_batch.

    It differs from the loss of Transformers in one value: without num_items_in_batch and counted labels, it is 0, not
    NaN.
    """
    target = _target(logits, labels, shift_labels, ignore_index)
    real = _real(logits)
    if real is not None:
        if torch.is_grad_enabled() or not _fits(real, target, vocab_size):
            return ForCausalLMLoss(real, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **options)
        # Without gradients, no float32 copy of the logits is needed.
        return _mean(
            cross_entropy, real.reshape(-1, vocab_size), target.reshape(-1), num_items_in_batch, ignore_index
        ).float()
    if not _fits(logits, target, vocab_size):
        return ForCausalLMLoss(
            logits.materialize(), labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **options
        )
    # The loss of transformers is float32 for every model.
    return _fused(logits, target, num_items_in_batch, ignore_index).float()


def masked_lm_loss(
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    """Return the cross entropy of each token's logits with its own label, which needs no shift."""
    return causal_lm_loss(logits, None, vocab_size, num_items_in_batch, ignore_index, labels, **options)


# Loss function of Transformers → its replacement.
MODEL_LOSSES: dict[Any, Any] = {ForCausalLMLoss: causal_lm_loss, ForMaskedLMLoss: masked_lm_loss}


def plain_cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy`, which some models and trainers call directly."""
    old = size_average is not None or reduce is not None
    plain = weight is None and reduction in ("mean", "sum") and not old
    real = _real(input)
    if real is not None or not plain or not _fits(input, target, input.shape[-1]) or input.ndim != 2:
        real = input.materialize() if real is None else real
        return F.cross_entropy(
            real, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing=label_smoothing
        )
    loss = _fused(input, target, 1 if reduction == "sum" else None, ignore_index, label_smoothing)
    return loss if torch.is_autocast_enabled(input.hidden.device.type) else loss.to(input.dtype)


LOSSES[F.cross_entropy] = plain_cross_entropy


def _real(logits: Any) -> Tensor | None:
    """Return the logits if they exist, or if the head no longer has the weights of its call; else None."""
    if not isinstance(logits, LazyLogits):
        return logits
    not_in_a_function(logits)
    weights = logits.call.weights
    if torch.compiler.is_compiling() or logits.call.open or weights is None or weights.are_in(logits.head):
        return logits.available()
    return logits.materialize()


def _fused(logits: LazyLogits, target: Tensor, items: Any, ignore_index: int, smoothing: float = 0.0) -> Tensor:
    still_valid(logits)
    if logits.constant and torch.is_grad_enabled():
        with torch.no_grad():
            return _fused(logits, target, items, ignore_index, smoothing)
    logits.call.used = True
    device = logits.device
    if device != logits.hidden.device:
        # The loss is computed where the head is, and only then moved.
        return _fused(_unmoved(logits), target, items, ignore_index, smoothing).to(device)
    target = target.to(device).reshape(logits.hidden.shape[:-1])
    in_chunks = partial(_in_chunks, target=target, items=items, ignore_index=ignore_index, smoothing=smoothing)
    if gathers_itself(logits.head):
        return in_one_call(logits.head, lambda rows: in_chunks(_with(logits, rows, logits.steps)), logits.hidden)
    form = scale_and_cap(logits.steps)
    if form is None or not plain_linear(logits.head):
        return in_chunks(logits)
    head: Any = logits.head
    scale, cap, bias = form
    if bias is not None and head.bias is not None and over_classes(head):
        # The head's bias is sharded, the other is whole.
        return in_chunks(logits)
    if bias is not None:
        # The term that the model adds to its logits becomes a bias of the head.
        bias = bias.to(head.weight.dtype) if head.bias is None else head.bias + bias.to(head.weight.dtype)
    options = {
        "bias": head.bias if bias is None else bias,
        "logit_scale": scale,
        "softcap": cap,
        "label_smoothing": smoothing,
        "vocab": vars(head).get(SHARD),
    }
    return _mean(linear_cross_entropy, logits.hidden, target, items, ignore_index, head.weight, **options)


def _unmoved(logits: LazyLogits) -> LazyLogits:
    device = logits.hidden.device
    steps = [step for step in logits.steps if not (step[0] == "to" and isinstance(step[1], torch.device))]
    steps = [(kind, value[0].to(device)) if kind == "add" else (kind, *value) for kind, *value in steps]
    return _with(logits, logits.hidden, tuple(steps))


def _with(logits: LazyLogits, hidden: Tensor, steps: tuple[Any, ...]) -> LazyLogits:
    return LazyLogits(hidden, logits.head, logits.classes, logits.dtype, logits.call, steps, True, logits.constant)


def _target(logits: Any, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    if shift_labels is None:
        if labels is None:
            raise LogitsError(
                "loss: labels or shift_labels must be given, got neither; call the model with labels=input_ids"
            )
        _whole_sequences(logits, labels)
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.to(logits.device)


def _whole_sequences(logits: Any, labels: Tensor) -> None:
    """Refuse to shift labels if this rank is known to hold only a part of each sequence.

    The next label of its last token is on another rank.
    """
    hidden: Any = logits.hidden if isinstance(logits, LazyLogits) else logits
    sequence = hidden.dim() - 2
    reason = None
    # torch's context_parallel, which accelerate and the Trainer use, replaces this function for as long as sequences
    # are sharded. The identity comes first: a compiler reads no attribute of a builtin function.
    attention: Any = F.scaled_dot_product_attention
    if attention is not ATTENTION and attention.__module__.startswith("torch.distributed.tensor.experimental"):
        reason = "torch's context_parallel is active"
    elif (
        any(p.is_shard(sequence) for p in getattr(hidden, "placements", ()))
        and labels.shape[-1] != hidden.shape[sequence]
    ):
        reason = f"hidden states are sharded: {hidden.placements}"
    if reason is not None:
        raise LogitsError(
            f"loss: shift_labels must be given where a rank has a part of each sequence ({reason}), got labels, whose "
            "next one is on another rank; pass shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, "
            "1:] of whole sequences, sharded as input_ids are"
        )


def _fits(logits: Any, target: Tensor, vocab_size: int) -> bool:
    """Return whether the shapes are as expected; if not, the original loss runs or raises its own error."""
    return (
        logits.shape[-1] == vocab_size and target.numel() * vocab_size == logits.numel() and target.dtype == torch.int64
    )


def plain_linear(head: nn.Module) -> bool:
    """Return whether the head's weight can be used directly.

    The head is a Linear, which FSDP renames, and its weight unquantized, and local or sharded over the classes.
    """
    if not isinstance(head, nn.Linear) or gathered(head):
        return False
    if type(head).__name__.removeprefix("FSDP") not in ("Linear", "ParametrizedLinear"):
        return False
    return type(head).forward is nn.Linear.forward and (type(head.weight) in PLAIN_WEIGHTS or over_classes(head))


def chunk_rows(device: torch.device, classes: int) -> int:
    """Return how many rows of logits a head that is called as a module computes at a time."""
    return max(1, CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS_DEVICE) // classes)


def _mean(
    op: Any, values: Tensor, target: Tensor, items: Any, ignore_index: int, *weight: Tensor, **options: Any
) -> Tensor:
    if isinstance(items, Tensor):
        items = items.to(values.device).reshape(())
    elif items is not None and not items > 0:
        items = torch.full((), items, device=values.device)
    return op(values, *weight, target, ignore_index=ignore_index, normalizer=items, **options)


def _in_chunks(
    logits: LazyLogits, target: Tensor, items: Tensor | int | None, ignore_index: int, smoothing: float
) -> Tensor:
    """Call any head as a module on some rows at a time, and again in the backward pass."""
    hidden, labels = logits.hidden.reshape(-1, logits.hidden.shape[-1]), target.reshape(-1)
    rows = chunk_rows(hidden.device, logits.classes)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    inside = HELD.head is logits.head

    def loss_of_rows(x: Tensor, y: Tensor) -> Tensor:
        with held(logits.head) if inside else nullcontext():
            real = replay(compute(logits.head, x, logits.call.weights, logits.call.autocast), logits.steps)
        return cross_entropy(real, y, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing)

    with eager_logits(), logits.call.again(logits.head, hidden.device):
        for start in range(0, hidden.shape[0], rows):
            x, y = hidden[start : start + rows], labels[start : start + rows]
            total = total + checkpointed(loss_of_rows, x, y, settings=logits.call.settings)
    if items is None:
        return total / (labels != ignore_index).sum().clamp(min=1)
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)
