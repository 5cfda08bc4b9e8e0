# SPDX-License-Identifier: Apache-2.0
"""The ops in plain eager PyTorch: the formulas of Transformers, with its casts to float32."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_bench.peers import Peer, by_name
from liger_core import TokenStatistics
from liger_core.errors import Unsupported
from liger_core.plugins import registry


def peers() -> list[Peer]:
    return [Peer("eager", calls())]


def calls() -> dict[str, Callable[..., Any]]:
    """Return a table op → its formula below, or its reference if it has none."""
    return {op.name: op.reference for op in registry().ops.values()} | CALLS


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0, cast: str = "input"
) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return wide.to(x.dtype)
    if cast == "input":
        return (weight + weight_offset if weight_offset else weight) * wide.to(x.dtype)
    return (wide * (weight_offset + weight.float())).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "input",
) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm(total, weight, eps, weight_offset, cast), total


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    total = residual + x
    return layer_norm(total, weight, bias, eps), total


def mix_streams(x: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def merge_streams(x: Tensor, y: Tensor, post: Tensor, res: Tensor | None = None) -> Tensor:
    # DeepSeek V4's formula; without a matrix, HY V4's, in float32.
    if res is None:
        return (post.float().unsqueeze(-1) * y.float().unsqueeze(-2) + x.float()).to(x.dtype)
    return post.to(x.dtype).unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(res.to(x.dtype), x)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if cos.shape[-1] != q.shape[-1]:
        raise Unsupported("it rotates whole heads only")
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    return q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin


def _half_turned(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast: str = "input",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return rope(
        rms_norm(q, q_weight, eps, weight_offset, cast), rms_norm(k, k_weight, eps, weight_offset, cast), cos, sin
    )


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def experts(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    # Transformers' default on a GPU, for experts without biases and limits.
    from transformers.integrations.moe import grouped_mm_experts_forward

    module: Any = SimpleNamespace(
        gate_up_proj=gate_up, down_proj=down, num_experts=gate_up.shape[0], _apply_gate=swiglu,
        has_gate=True, has_bias=False, is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False,
    )  # fmt: skip
    return grouped_mm_experts_forward(module, x, index, weight)


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    normalizer: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    flat = logits.float().view(-1, logits.shape[-1])
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if normalizer is not None:
        return F.cross_entropy(flat, target.view(-1), **options, reduction="sum") / normalizer
    loss = F.cross_entropy(flat, target.view(-1), **options, reduction=reduction)
    return loss.view(target.shape) if reduction == "none" else loss


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    reduction: str = "mean", normalizer: Tensor | float | None = None, budget: int | None = None,
) -> Tensor:  # fmt: skip
    logits = _logits(hidden, weight, bias, logit_scale)
    return cross_entropy(logits, target, class_weight, ignore_index, label_smoothing, softcap, reduction, normalizer)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Return all logits, whatever the budget."""
    logits = F.linear(hidden, weight, bias)
    return logits if scale == 1.0 else logits * scale


def lora_linear(
    x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, bias: Tensor | None = None,
    base: Tensor | None = None,
    column_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute a LoRA layer as PEFT does: cast x to the adapter's dtype and add the product in that dtype."""
    layer = F.linear(x, weight, bias if column_scale is None else None) if base is None and weight is not None else base
    if layer is None:
        raise Unsupported("it adds to a layer")
    y = layer + F.linear(F.linear(x.to(a.dtype), a), b) * scale
    if column_scale is not None:
        y = y * column_scale if bias is None else y * column_scale + bias
    return y.to(layer.dtype)


def lora_linears(
    x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, weight_2: Tensor | None, a_2: Tensor, b_2: Tensor,
    weight_3: Tensor | None = None, a_3: Tensor | None = None, b_3: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    first, second = lora_linear(x, weight, a, b, scale), lora_linear(x, weight_2, a_2, b_2, scale)
    return (first, second) if a_3 is None or b_3 is None else (first, second, lora_linear(x, weight_3, a_3, b_3, scale))


def linear_log_prob(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100, return_entropy: bool = False,
    return_statistics: bool = False, budget: int | None = None,
) -> Any:  # fmt: skip
    logits = _logits(hidden, weight, bias, logit_scale)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if temperature != 1.0:
        logits = logits / temperature
    logits = logits.float()
    all_log_probs = torch.log_softmax(logits, dim=-1)
    index = target if target.dim() == hidden.dim() else target[..., None]
    counted = index != ignore_index
    log_prob = all_log_probs.gather(-1, index.where(counted, 0)).where(counted, 0.0).view(target.shape)
    if not (return_entropy or return_statistics):
        return log_prob
    some, probs = counted.any(-1), all_log_probs.exp()
    entropy = -(probs * all_log_probs).sum(-1).where(some, 0.0)
    if return_entropy:
        return log_prob, entropy
    return log_prob, TokenStatistics(
        entropy,
        logits.logsumexp(-1).where(some, 0.0),
        logits.mean(-1).where(some, 0.0),
        probs.square().sum(-1).where(some, 0.0),
        logits.argmax(-1).where(some, -1),
    )


def linear_divergence(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, bias: Tensor | None = None,
    teacher_bias: Tensor | None = None, kind: str = "forward_kl", beta: float = 0.5, temperature: float = 1.0,
    reduction: str = "mean", normalizer: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    # It materializes the logits of both sides.
    logits, teacher = F.linear(hidden, weight, bias), F.linear(teacher_hidden, teacher_weight, teacher_bias)
    return _divergence(kind, logits, teacher, beta, temperature, reduction, normalizer)


def kl_div(
    student: Tensor,
    teacher: Tensor,
    reverse: bool = False,
    temperature: float = 1.0,
    reduction: str = "mean",
    normalizer: Tensor | float | None = None,
) -> Tensor:
    return _divergence(
        "reverse_kl" if reverse else "forward_kl", student, teacher, 0.5, temperature, reduction, normalizer
    )


def total_variation(
    student: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    reduction: str = "mean",
    normalizer: Tensor | float | None = None,
) -> Tensor:
    return _divergence("total_variation", student, teacher, 0.5, temperature, reduction, normalizer)


def _divergence(
    kind: str, student: Tensor, teacher: Tensor, beta: float = 0.5, temperature: float = 1.0, reduction: str = "mean",
    normalizer: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    """Compute a divergence as trainers do: log-softmax of both sides in float32, then torch.nn.functional.kl_div."""
    log_q, log_p = (torch.log_softmax(x.float() / temperature, dim=-1) for x in (student, teacher))

    def kl(log_first: Tensor, log_second: Tensor) -> Tensor:
        return F.kl_div(log_second, log_first, reduction="none", log_target=True).sum(-1)

    if kind == "forward_kl":
        loss = kl(log_p, log_q)
    elif kind == "reverse_kl":
        loss = kl(log_q, log_p)
    elif kind == "total_variation":
        loss = 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    else:
        mixture = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        of_teacher, of_student = {"skewed_kl": (1.0, 0.0), "skewed_reverse_kl": (0.0, 1.0)}.get(
            kind, (beta, 1.0 - beta)
        )
        loss = of_teacher * kl(log_p, mixture) + of_student * kl(log_q, mixture)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (loss.numel() if normalizer is None else normalizer)


def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    return F.embedding(index, weight, padding_idx)


# The ops that Transformers writes differently from their references.
CALLS = (
    by_name(rms_norm, add_rms_norm, layer_norm, add_layer_norm, rope, qk_norm_rope, mix_streams, merge_streams)
    | by_name(swiglu, geglu, experts, embedding, lora_linear, lora_linears, cross_entropy, linear_cross_entropy)
    | by_name(linear_log_prob, linear_divergence, kl_div, total_variation)
    | {"jsd": partial(_divergence, "jsd")}
)
