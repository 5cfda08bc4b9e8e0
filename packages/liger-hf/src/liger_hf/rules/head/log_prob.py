# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities from a model's output head, of any kind."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_core import linear_log_prob
from liger_hf.repeated import Settings, checkpointed, settings_of
from liger_hf.rules.head.causal_loss import chunk_rows, plain_linear
from liger_hf.rules.head.projection import eager_logits, gathers_itself, in_one_call
from liger_hf.rules.head.weights import held

LogProb = Tensor | tuple[Tensor, Tensor]


def head_log_prob(
    head: nn.Module,
    hidden: Tensor,
    target: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
) -> LogProb:
    """Compute `linear_log_prob` with the output head as a module: adapted, quantized, offloaded, or sharded.

        log_prob, entropy = head_log_prob(model.lm_head, hidden, target, return_entropy=True)

    head    model.get_output_embeddings(). A plain head runs `linear_log_prob` with its weight and bias. Any other head
            is called on a few rows at a time, and again in the backward pass, and all its parameters get gradients
    hidden  (..., H)
    target  (...) or (..., K), and the options as in `linear_log_prob`

    A head that FSDP2 or ZeRO-3 gathers by itself is called once, so ranks may have different numbers of tokens. A head
    that is sharded with the rest of the model is whole only in the model's forward: call this function there.
    """
    options: dict[str, Any] = {
        "softcap": softcap,
        "logit_scale": logit_scale,
        "ignore_index": ignore_index,
        "return_entropy": return_entropy,
    }
    gathers = gathers_itself(head)

    def forward(rows: Tensor) -> Any:
        if not gathers:
            return head(rows)
        # Also in the backward pass, which recomputes these rows.
        with held(head):
            return head.forward(rows)

    def compute(rows: Tensor) -> LogProb:
        if plain_linear(head):
            weight, bias = cast(tuple[Tensor, Tensor | None], (head.weight, head.bias))
            return linear_log_prob(rows, weight, target, bias=bias, temperature=temperature, **options)
        classes: int = head.out_features  # type: ignore[assignment]
        weight = rows.detach().new_zeros(()).expand(classes, rows.shape[-1])
        linear_log_prob.check(rows, weight, target, temperature=temperature, **options)
        return _in_chunks(
            forward, rows, target, temperature, chunk_rows(rows.device, classes), options, settings_of(head)
        )

    return in_one_call(head, compute, hidden) if gathers else compute(hidden)


def _in_chunks(
    forward: Callable[[Tensor], Any], hidden: Tensor, target: Tensor, temperature: Tensor | float, size: int,
    options: dict[str, Any],
    settings: Settings | None,
) -> LogProb:  # fmt: skip
    rows, shape = hidden.reshape(-1, hidden.shape[-1]), hidden.shape[:-1]
    index = target.reshape(rows.shape[0], -1)
    if not isinstance(temperature, Tensor):
        temperature = torch.full((rows.shape[0],), temperature).to(rows.device)
    tensors = (rows, index, temperature.reshape(-1, 1))
    with eager_logits():
        parts = [
            checkpointed(_of_rows, forward, x, y, t, options, settings=settings)
            for x, y, t in zip(*(tensor.split(size) for tensor in tensors), strict=True)
        ]
    log_prob, entropy = (torch.cat(side) for side in zip(*parts, strict=True))
    log_prob = log_prob.reshape(target.shape)
    return (log_prob, entropy.reshape(shape)) if options["return_entropy"] else log_prob


def _of_rows(
    forward: Callable[[Tensor], Any], hidden: Tensor, target: Tensor, temperature: Tensor, options: dict[str, Any]
) -> Any:
    logits = forward(hidden)
    logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32) * options["logit_scale"]
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    log = (logits / temperature.to(logits.dtype)).log_softmax(-1)
    counted = target != options["ignore_index"]
    log_prob = torch.where(counted, log.gather(-1, torch.where(counted, target, 0)), 0.0)
    if not options["return_entropy"]:
        return log_prob, log_prob[:, 0]
    # A class at -inf adds no entropy and gets no gradient.
    safe = torch.where(log > -torch.inf, log, 0.0)
    return log_prob, torch.where(counted.any(-1), -(log.exp() * safe).sum(-1), 0.0)
