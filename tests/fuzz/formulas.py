# SPDX-License-Identifier: Apache-2.0
"""The formulas of the ops, written apart from their references: in float64 they are exact, in a lower dtype what plain
PyTorch gives.

Gradients come from autograd. Roundings that a definition names are written out; in float64 they change nothing.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_core import LossMetrics, TokenStatistics


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and statistics."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0, cast: str = "input"
) -> Tensor:
    row = x.to(wide(x.dtype))
    width = max(1, x.shape[-1])
    normed = row / (row.pow(2).sum(-1, keepdim=True) / width + eps).sqrt()
    if cast == "input":
        normed = normed.to(x.dtype)
    if weight is None:
        return normed.to(x.dtype)
    return (normed.to(row.dtype) * (weight.to(row.dtype) + weight_offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0,
    cast: str = "input",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    summed = (x.to(wide(x.dtype)) + residual.to(wide(x.dtype))).to(x.dtype)
    return rms_norm(summed, weight, eps, weight_offset=weight_offset, cast=cast), summed


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    row = x.to(wide(x.dtype))
    width = max(1, x.shape[-1])
    around = row - row.sum(-1, keepdim=True) / width
    y = around / (around.pow(2).sum(-1, keepdim=True) / width + eps).sqrt()
    y = y if weight is None else y * weight.to(row.dtype)
    return (y if bias is None else y + bias.to(row.dtype)).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    summed = (x.to(wide(x.dtype)) + residual.to(wide(x.dtype))).to(x.dtype)
    return layer_norm(summed, weight, bias, eps), summed


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0,
    activation: str = "silu", gate_first: bool = False, group_size: int | None = None,
) -> Tensor:  # fmt: skip
    row, by = x.to(wide(x.dtype)), gate.to(wide(x.dtype))
    by = torch.sigmoid(by) * (by if activation == "silu" else 1.0)
    row = row * by if gate_first else row
    size = max(1, x.shape[-1] if group_size is None else group_size)
    parts = [part / (part.pow(2).sum(-1, keepdim=True) / size + eps).sqrt() for part in row.split(size, dim=-1)]
    y = torch.cat(parts, dim=-1)
    y = y if weight is None else y * (weight.to(row.dtype) + weight_offset)
    return (y if gate_first else y * by).to(x.dtype)


def modulated_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor | None = None, weight: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    return _modulated(rms_norm(x.to(wide(x.dtype)), weight, eps, cast="float32"), scale, shift).to(x.dtype)


def modulated_layer_norm(x: Tensor, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return _modulated(layer_norm(x.to(wide(x.dtype)), eps=eps), scale, shift).to(x.dtype)


def _modulated(normed: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    y = normed + normed * scale.to(normed.dtype)[..., None, :]
    return y if shift is None else y + shift.to(normed.dtype)[..., None, :]


def mix_streams(x: Tensor, pre: Tensor) -> Tensor:
    return torch.einsum("...i,...id->...d", pre.to(wide(x.dtype)), x.to(wide(x.dtype))).to(x.dtype)


def project_streams(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    rows = rms_norm(x.to(wide(x.dtype)).flatten(-2), eps=eps, cast="float32")
    return torch.einsum("...d,cd->...c", rows, weight.to(rows.dtype))


def merge_streams(x: Tensor, y: Tensor, post: Tensor, res: Tensor | None = None) -> Tensor:
    streams, update, post = (t.to(wide(x.dtype)) for t in (x, y, post))
    kept = streams if res is None else torch.einsum("...ij,...jd->...id", res.to(streams.dtype), streams)
    return (kept + torch.einsum("...i,...d->...id", post, update)).to(x.dtype)


def sinkhorn(x: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    p = x.to(wide(x.dtype)).softmax(-1) + eps
    for step in range(1, 2 * iterations):
        p = torch.div(p, p.sum(-1 - step % 2, keepdim=True) + eps)
    return p.to(x.dtype)


def attention_residual(layers: Tensor, query: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    value = layers.to(wide(layers.dtype))
    keys = rms_norm(value, weight, eps, cast="float32")
    score = torch.einsum("k...d,d->k...", keys, query.to(value.dtype))
    # About the layer with the highest score: where its attention is nearly 1, even float64 loses the gradients of the
    # others' scores.
    nearest = value.take_along_dim(score.argmax(0, keepdim=True).unsqueeze(-1), 0)
    return (nearest[0] + torch.einsum("k...,k...d->...d", score.softmax(0), value - nearest)).to(layers.dtype)


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    row = x.to(wide(x.dtype))
    width, y = max(1, x.shape[-1]), torch.zeros_like(row)
    for exponent in (3, 2, 1):
        power = row**exponent
        y = y + weight[3 - exponent].to(row.dtype) * power / (power.pow(2).sum(-1, keepdim=True) / width + eps).sqrt()
    return (y if bias is None else y + bias.to(row.dtype)).to(x.dtype)


def sparsemax(x: Tensor) -> Tensor:
    row = x.to(wide(x.dtype))
    with torch.no_grad():
        # The threshold by bisection; what is above it is the support.
        low, high = row.amax(-1, keepdim=True) - 1, row.amax(-1, keepdim=True)
        for _ in range(60):
            middle = (low + high) / 2
            enough = (row - middle).clamp(min=0).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        inside = row > high
    size = inside.sum(-1, keepdim=True)
    threshold = (row.where(inside, 0).sum(-1, keepdim=True) - 1) / size
    return (row - threshold).where(inside, row * 0).to(x.dtype)


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    per_channel = (-1, *(1,) * (x.dim() - 2))
    if x.numel() == 0:
        y = x if weight is None else x * weight.reshape(per_channel)
        return y if bias is None else y + bias.reshape(per_channel)
    size = x[0].numel() // num_groups
    y = layer_norm(x.to(wide(x.dtype)).reshape(-1, size), eps=eps).reshape(x.shape)
    y = y if weight is None else y * weight.to(y.dtype).reshape(per_channel)
    return (y if bias is None else y + bias.to(y.dtype).reshape(per_channel)).to(x.dtype)


def dyt(x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    row = x.to(wide(x.dtype))
    y = torch.tanh(row * alpha.to(row.dtype))
    y = y if weight is None else y * weight.to(row.dtype)
    return (y if bias is None else y + bias.to(row.dtype)).to(x.dtype)


def softmax(x: Tensor) -> Tensor:
    # PyTorch's own, whose gradient is that of the rounded probabilities, as the definition says: where one is almost 1,
    # little is left of it.
    return x.softmax(-1)


def swiglu(
    gate: Tensor, up: Tensor | None = None, *, limit: float | None = None, alpha: float = 1.0, shift: float = 0.0,
    gate_scale: float = 1.0, scale: float = 1.0, overwrite: bool = False,
) -> Tensor:  # fmt: skip
    gate, up = _halves(gate, up)
    row = gate.to(wide(gate.dtype))
    if limit is None and alpha == gate_scale == scale == 1.0 and not shift:
        return (row * torch.sigmoid(row)).to(gate.dtype) * up
    row, factor, bound = row * gate_scale, up.to(row.dtype), math.inf if limit is None else limit
    row = torch.where(row > bound, bound, row)
    factor = torch.where(factor > bound, bound, torch.where(factor < -bound, -bound, factor))
    return (row * torch.sigmoid(alpha * row) * (factor + shift) * scale).to(gate.dtype)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh", overwrite: bool = False) -> Tensor:
    gate, up = _halves(gate, up)
    row = gate.to(wide(gate.dtype))
    return _gelu(row, exact=approximate == "none").to(gate.dtype) * up


def _gelu(x: Tensor, exact: bool) -> Tensor:
    inner = torch.erf(x / math.sqrt(2)) if exact else torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x / 2 * (1 + inner)


def relu_squared(x: Tensor, up: Tensor | None = None) -> Tensor:
    squared = (torch.where(x > 0, x, 0.0) * x.clamp(min=0)).to(x.dtype)
    return squared if up is None else squared * up


def embedding(index: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    table = weight.to(wide(weight.dtype))
    if padding_idx is not None:
        padding = torch.arange(len(table), device=table.device)[:, None] == padding_idx
        table = torch.where(padding, table.detach(), table)
    one_hot = torch.nn.functional.one_hot(index, len(table)).to(table.dtype)
    # Infinities are not drawn here, so that nothing is lost in a product with 0.
    return (one_hot @ table).to(weight.dtype)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    rotary = cos.shape[-1]
    column = torch.arange(rotary // 2, device=q.device)
    first, second = (2 * column, 2 * column + 1) if interleaved else (column, column + rotary // 2)
    # One table for all heads.
    cos, sin = (t.to(wide(q.dtype)).unsqueeze(-3) for t in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., first].to(cos.dtype), x[..., second].to(cos.dtype)
        y = torch.zeros_like(x)
        y[..., rotary:] = x[..., rotary:]
        y[..., first] = (a * cos[..., first] - b * sin[..., first]).to(x.dtype)
        y[..., second] = (b * cos[..., second] + a * sin[..., second]).to(x.dtype)
        return y

    return turned(q), turned(k)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    weight_offset: float = 0.0, cast: str = "input", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = {"weight_offset": weight_offset, "cast": cast}
    normed = (rms_norm(x, weight, eps, **options) for x, weight in ((q, q_weight), (k, k_weight)))
    return rope(*normed, cos, sin, interleaved=interleaved)


def cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, temperature: float = 1.0,
    reduction: str = "mean", normalizer: Tensor | float | None = None, return_metrics: bool = False,
) -> Any:  # fmt: skip
    z = _capped(logits.reshape(-1, logits.shape[-1]), 1.0, softcap) / temperature
    return _loss(
        z, target, weight, ignore_index, label_smoothing, z_loss, reduction, normalizer, return_metrics=return_metrics
    )


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, reduction: str = "mean", normalizer: Tensor | float | None = None,
    token_weight: Tensor | None = None, accumulate_dtype: torch.dtype | None = None, chunk: int | str | None = None,
    budget: int | None = None, pack: bool = True, main_grad: Tensor | None = None, return_metrics: bool = False,
) -> Any:  # fmt: skip
    z = _capped(_logits(hidden, weight, bias), logit_scale, softcap)
    return _loss(
        z, target, class_weight, ignore_index, label_smoothing, z_loss, reduction, normalizer, token_weight,
        return_metrics,
    )  # fmt: skip


def lora_linear(
    x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, *, bias: Tensor | None = None,
    base: Tensor | None = None, column_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    own = base
    if weight is not None:
        # Rounded once, as a matmul with a bias is.
        own = torch.einsum("...k,mk->...m", x.to(wide(x.dtype)), weight.to(wide(x.dtype)))
        own = (own if bias is None or column_scale is not None else own + bias).to(x.dtype)
    small = torch.einsum("...k,rk->...r", x.to(a.dtype), a)
    if column_scale is not None:
        y = (own.to(wide(own.dtype)) + torch.einsum("...r,mr->...m", small, b) * scale) * column_scale
        return (y if bias is None else y + bias).to(own.dtype)
    return (own + torch.einsum("...r,mr->...m", small, b) * scale).to(own.dtype)


def lora_linears(
    x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, weight_2: Tensor | None, a_2: Tensor, b_2: Tensor,
    weight_3: Tensor | None = None, a_3: Tensor | None = None, b_3: Tensor | None = None, scale: float = 1.0, *,
    bias: Tensor | None = None, bias_2: Tensor | None = None, bias_3: Tensor | None = None,
    base: Tensor | None = None, base_2: Tensor | None = None, base_3: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    results = (
        lora_linear(x, weight, a, b, scale, bias=bias, base=base),
        lora_linear(x, weight_2, a_2, b_2, scale, bias=bias_2, base=base_2),
    )
    if a_3 is None or b_3 is None:
        return results
    return (*results, lora_linear(x, weight_3, a_3, b_3, scale, bias=bias_3, base=base_3))


def linear_log_prob(
    hidden: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, temperature: Tensor | float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100, allowed: Tensor | None = None,
    logits_dtype: torch.dtype | None = None, return_entropy: bool = False, return_statistics: bool = False,
    accumulate_dtype: torch.dtype | None = None, chunk: int | str | None = None, budget: int | None = None,
    pack: bool = True, main_grad: Tensor | None = None, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    finer = hidden.dtype if logits_dtype is None else torch.promote_types(hidden.dtype, logits_dtype)
    logits = _logits(hidden.to(finer), weight.to(finer), None if bias is None else bias.to(finer))
    if logits.requires_grad:
        # The gradient of the logits has the dtype of the matmuls that take it.
        logits.register_hook(lambda grad: grad.to(hidden.dtype).to(finer))
    z = _capped(logits, logit_scale, softcap)
    z = z / (temperature.reshape(-1, 1).to(z.dtype) if isinstance(temperature, Tensor) else temperature)
    shape = hidden.shape[:-1]
    several = target.reshape(z.shape[0], target.shape[-1] if target.dim() == hidden.dim() else 1)
    named = several != ignore_index
    counted = named.any(-1)
    every, inside = z, torch.ones_like(z, dtype=torch.bool)
    if allowed is not None:
        classes = allowed.reshape(z.shape[0], allowed.shape[-1])
        some = (classes != ignore_index).any(-1) & counted
        both = torch.cat((several, classes), -1)
        # One more column takes targets that are not classes.
        marked = torch.zeros(z.shape[0], z.shape[1] + 1, dtype=torch.bool, device=z.device)
        marked.scatter_(-1, torch.where(both == ignore_index, z.shape[1], both), True)
        inside = marked[:, :-1] | ~some[:, None]
        z = torch.where(inside, z, -torch.inf)
    log_p, log_sum, entropy = _softmax(z)
    chosen = log_p.gather(-1, torch.where(named, several, 0))
    log_prob = torch.where(named, chosen, 0.0).reshape(target.shape)

    def kept(row: Tensor) -> Tensor:
        return torch.where(counted, row, 0.0).reshape(shape)

    if return_statistics:
        first = torch.where(counted, every.argmax(-1), -1).reshape(shape)
        collision = log_p.exp().square().sum(-1)
        return log_prob, TokenStatistics(kept(entropy), kept(log_sum), kept(every.mean(-1)), kept(collision), first)
    return (log_prob, kept(entropy)) if return_entropy else log_prob


def linear_divergence(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *, bias: Tensor | None = None,
    teacher_bias: Tensor | None = None, kind: str = "forward_kl", beta: float = 0.5, temperature: float = 1.0,
    target: Tensor | None = None, hard_weight: float = 0.0, ignore_index: int = -100, logit_scale: float = 1.0,
    softcap: float | None = None, teacher_logit_scale: float = 1.0, teacher_softcap: float | None = None,
    reduction: str = "mean", normalizer: Tensor | float | None = None, accumulate_dtype: torch.dtype | None = None,
    chunk: int | str | None = None, budget: int | None = None, pack: bool = True, main_grad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    z = _capped(_logits(hidden, weight, bias), logit_scale, softcap)
    other = _capped(_logits(teacher_hidden, teacher_weight, teacher_bias), teacher_logit_scale, teacher_softcap)
    loss = _divergence(z / temperature, other / temperature, kind, beta).sum(-1)
    every = torch.ones(z.shape[0], dtype=torch.bool, device=z.device)
    counted = every if target is None else target.reshape(-1) != ignore_index
    if hard_weight and target is not None:
        loss = (1 - hard_weight) * loss - hard_weight * _chosen(_softmax(z)[0], target.reshape(-1), counted)
    return _reduced(torch.where(counted, loss, 0.0).reshape(hidden.shape[:-1]), reduction, normalizer, counted.sum())


def kl_div(
    student: Tensor, teacher: Tensor, *, reverse: bool = False, skew: float = 0.0, temperature: float = 1.0,
    reduction: str = "mean", normalizer: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    kind, beta = ("reverse_kl", 0.5) if reverse else ("forward_kl", 0.5)
    if skew:
        kind, beta = ("skewed_reverse_kl", 1 - skew) if reverse else ("skewed_kl", skew)
    return _of_logits(student, teacher, kind, beta, temperature, reduction, normalizer)


def jsd(
    student: Tensor, teacher: Tensor, *, beta: float = 0.5, temperature: float = 1.0, reduction: str = "mean",
    normalizer: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    return _of_logits(student, teacher, "jsd", beta, temperature, reduction, normalizer)


def total_variation(
    student: Tensor, teacher: Tensor, *, temperature: float = 1.0, reduction: str = "mean",
    normalizer: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    return _of_logits(student, teacher, "total_variation", 0.5, temperature, reduction, normalizer)


def _of_logits(
    student: Tensor, teacher: Tensor, kind: str, beta: float, temperature: float, reduction: str,
    normalizer: Tensor | float | None,
) -> Tensor:  # fmt: skip
    dtype = wide(student.dtype)
    terms = _divergence(student.to(dtype) / temperature, teacher.to(dtype) / temperature, kind, beta)
    if reduction == "classes":
        return terms
    loss = terms.sum(-1)
    return _reduced(loss, reduction, normalizer, torch.tensor(loss.numel()))


def _divergence(z: Tensor, other: Tensor, kind: str, beta: float) -> Tensor:
    """Terms of the divergence of the last dimension, of log-probabilities as they are."""
    log_q, log_p = _softmax(z)[0], _softmax(other.to(z.dtype))[0]

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        possible = log_a != -torch.inf
        distance = torch.where(possible, log_a, 0.0) - torch.where(possible, log_b, 0.0)
        return torch.where(possible, log_a.exp() * distance, 0.0)

    if kind == "forward_kl":
        return kl(log_p, log_q)
    if kind == "reverse_kl":
        return kl(log_q, log_p)
    if kind == "total_variation":
        return 0.5 * (log_p.exp() - log_q.exp()).abs()
    # Where both are 0 any finite number will do.
    neither = (log_p == -torch.inf) & (log_q == -torch.inf)
    shares = (torch.where(neither, 0.0, side) + math.log(share) for side, share in ((log_p, beta), (log_q, 1 - beta)))
    mixture = torch.logaddexp(*shares)
    return {
        "skewed_kl": lambda: kl(log_p, mixture),
        "skewed_reverse_kl": lambda: kl(log_q, mixture),
        "jsd": lambda: beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture),
    }[kind]()


def _reduced(loss: Tensor, reduction: str, normalizer: Tensor | float | None, count: Tensor) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / ((count.clamp(min=1) if normalizer is None else normalizer) if reduction == "mean" else 1)


def rows(op: str, given: Mapping[str, Any]) -> Tensor:
    """The rows of which the softmax is taken, for a loss by its name."""
    if op == "cross_entropy":
        return _capped(given["logits"].reshape(-1, given["logits"].shape[-1]), 1.0, given["softcap"])
    return _capped(_logits(given["hidden"], given["weight"], given.get("bias")), given["logit_scale"], given["softcap"])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = hidden.reshape(-1, hidden.shape[-1]) @ weight.t()
    return z if bias is None else z + bias


def _capped(z: Tensor, scale: float, softcap: float | None) -> Tensor:
    z = z.to(wide(z.dtype)) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _softmax(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log p, log-sum-exp, entropy) of every row. Distances to the maximum are exact where it is far from 0."""
    top = z.detach().amax(-1, keepdim=True)
    below = z - top
    rest = below.exp().sum(-1).log()
    log_p = below - rest[..., None]
    p = log_p.exp()
    return log_p, top[..., 0] + rest, -(p * torch.where(p > 0, log_p, 0.0)).sum(-1)


def _chosen(log_p: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    return log_p.gather(-1, torch.where(counted, labels, 0)[:, None])[:, 0]


def _loss(
    z: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str, normalizer: Tensor | float | None, token_weight: Tensor | None = None, return_metrics: bool = False,
) -> Any:  # fmt: skip
    labels = target.reshape(-1)
    counted = labels != ignore_index
    log_p, lse, entropy = _softmax(z)
    class_weight = z.new_ones(z.shape[1]) if class_weight is None else class_weight.to(z.dtype)
    own = class_weight[torch.where(counted, labels, 0)]
    loss = -(1 - label_smoothing) * own * _chosen(log_p, labels, counted)
    if label_smoothing:
        loss = loss - label_smoothing / z.shape[1] * (log_p * class_weight).sum(-1)
    penalty = z_loss * lse * lse
    if z_loss:
        loss = loss + penalty
    if token_weight is not None:
        factor = token_weight.reshape(-1).to(z.dtype)
        loss, penalty = loss * factor, penalty * factor
    loss, penalty = torch.where(counted, loss, 0.0), torch.where(counted, penalty, 0.0)
    if normalizer is None:
        divide = torch.where(counted, own, 0.0).sum()
        divide = torch.where(divide == 0, 1.0, divide)
    else:
        divide = torch.as_tensor(normalizer, dtype=z.dtype, device=z.device)
    result = {"none": loss.reshape(target.shape), "sum": loss.sum(), "mean": loss.sum() / divide}[reduction]
    if not return_metrics:
        return result
    prediction = torch.where(counted, z.argmax(-1), -1)
    hit = (counted & (prediction == labels)).to(z.dtype)
    entropy = torch.where(counted, entropy, 0.0)
    if reduction == "none":
        parts = (penalty, hit, prediction, entropy)
        return result, LossMetrics(*(part.detach().reshape(target.shape) for part in parts))
    number = counted.sum().clamp(min=1)
    penalty = penalty.sum() / divide if reduction == "mean" else penalty.sum()
    metrics = (penalty, hit.sum() / number, prediction.reshape(target.shape), entropy.sum() / number)
    return result, LossMetrics(*(metric.detach() for metric in metrics))


def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, activation: str = "silu", limit: float | None = None, alpha: float = 1.0,
    shift: float = 0.0, interleaved: bool = False, gate_up_a: Tensor | None = None, gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None, down_b: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Expert by expert and slot by slot, on all tokens; those that are routed elsewhere are zeros."""
    y = torch.zeros_like(x, dtype=wide(x.dtype))
    for e, k in itertools.product(range(gate_up.shape[0]), range(index.shape[1])):
        own = index[:, k, None] == e
        rows = torch.where(own, x, 0.0)
        joined = rows @ gate_up[e].t()
        if gate_up_a is not None and gate_up_b is not None:
            joined = joined + torch.einsum("nh,rh,or->no", rows, gate_up_a[e], gate_up_b[e])
        joined = joined.to(y.dtype)
        if gate_up_bias is not None:
            joined = joined + gate_up_bias[e].to(y.dtype)
        active = _expert_gate(joined, down.shape[2], activation, limit, alpha, shift, interleaved).to(x.dtype)
        out = active @ down[e].t()
        if down_a is not None and down_b is not None:
            out = out + torch.einsum("ni,ri,hr->nh", active, down_a[e], down_b[e])
        out = out.to(y.dtype)
        if down_bias is not None:
            out = out + down_bias[e].to(y.dtype)
        y = y + torch.where(own, weight[:, k, None], 0.0).to(y.dtype) * out
    return y.to(x.dtype)


def _expert_gate(
    joined: Tensor, inner: int, activation: str, limit: float | None, alpha: float, shift: float, interleaved: bool
) -> Tensor:
    columns = torch.arange(inner, device=joined.device)
    gate, up = joined, None
    if joined.shape[1] > inner:
        gate, up = (joined[:, 2 * columns + i if interleaved else i * inner + columns] for i in (0, 1))
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = None if up is None else torch.where(up.abs() > limit, torch.sign(up) * limit, up)
    if activation == "silu":
        active = gate * torch.sigmoid(alpha * gate)
    elif activation == "relu_squared":
        active = torch.where(gate > 0, gate * gate, 0.0)
    else:
        active = _gelu(gate, exact=activation == "gelu")
    return active if up is None else active * (up + shift)
