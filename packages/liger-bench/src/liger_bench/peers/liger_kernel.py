# SPDX-License-Identifier: Apache-2.0
"""liger-kernel 0.8.5: its Triton kernels, variants of its linear losses, and its CuTe kernels if it has them.

Variants: float32 accumulation and long chunks for linear_cross_entropy, the divergence from soft labels, the per-token
loss in chunks of logits, which runs where it has no kernel, and with LIGER_FUSED_MOE_AUTOTUNE=0 the experts without
their autotuner.

They are measured as users call them, with two exceptions: `in_place=False`, because its norms by default overwrite the
upstream gradient, which another op may need; and copies of the arguments that rope, the gated activations and
cross_entropy overwrite.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_bench.peers import Peer, by_name, missing, teacher_share, with_one_target
from liger_core.errors import Unsupported

# Forward passes of rope and cross_entropy, and backward passes of rope and the gated activations.
OVERWRITES = {
    "rope": ("q", "k", "gradients"),
    "qk_norm_rope": ("gradients",),
    "swiglu": ("gate", "up"),
    "geglu": ("gate", "up"),
    "cross_entropy": ("logits",),
}


def unavailable(device: torch.device) -> str | None:
    reason = missing("liger_kernel", "liger-kernel==0.8.5") or missing("triton", "triton")
    if reason is None and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "its kernels need a CUDA GPU"
    return reason


def peers() -> list[Peer]:
    from_package = importlib.import_module("liger_kernel.transformers.functional")
    triton = _calls(from_package, linear=partial(_linear, from_package.liger_fused_linear_cross_entropy))
    variants = [
        Peer("liger-kernel", triton, OVERWRITES),
        Peer("liger-kernel fp32", {"linear_cross_entropy": _variant(from_package, accum_dtype=torch.float32)}),
        Peer("liger-kernel long chunks", {"linear_cross_entropy": _variant(from_package, chunk_mem_const=32)}),
        Peer("liger-kernel soft labels", _soft_labels(from_package)),
        Peer("liger-kernel chunks", _chunks()),
    ]
    if os.environ.get("LIGER_FUSED_MOE_AUTOTUNE", "1").lower() in ("0", "false", "no"):
        variants.append(Peer("liger-kernel untuned", {"experts": triton.pop("experts")}))
    # Its CuTe kernels need Hopper or newer.
    if importlib.util.find_spec("cutlass") and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9:
        variants.append(Peer("liger-kernel cute", _cute(), OVERWRITES))
    return variants


def _casting(cast: str) -> str:
    return "llama" if cast == "input" else "gemma"


def _row_ops(package: Any) -> dict[str, Callable[..., Any]]:
    def rms_norm(
        x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0, cast: str = "input"
    ) -> Any:
        return package.liger_rms_norm(x, weight, eps, weight_offset, _casting(cast), in_place=False)

    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, cast: str = "input"
    ) -> Any:
        return package.liger_fused_add_rms_norm(x, residual, weight, eps, weight_offset, _casting(cast), in_place=False)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return package.liger_rope(q, k, cos, sin)

    def qk_norm_rope(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6,
        weight_offset: float = 0.0,
        cast: str = "input",
    ) -> Any:  # fmt: skip
        # Normalized before the transpose of heads and tokens, as in a model.
        pairs = ((q, q_weight), (k, k_weight))
        q, k = (rms_norm(x.transpose(1, 2), weight, eps, weight_offset, cast).transpose(1, 2) for x, weight in pairs)
        return rope(q, k, cos, sin)

    def poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Any:
        # Its gradient of bias is a scalar.
        return package.liger_poly_norm(x, weight, bias.view(()), eps, in_place=False)

    def group_norm(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Any:
        return package.liger_group_norm(x, weight, bias, x.shape[1], num_groups, eps)

    def modulated_rms_norm(
        x: Tensor, scale: Tensor, shift: Tensor | None = None, weight: Tensor | None = None, eps: float = 1e-6
    ) -> Any:
        return package.liger_modulated_rms_norm(x, weight, scale, shift, eps, in_place=False)

    return by_name(rms_norm, add_rms_norm, rope, qk_norm_rope, poly_norm, group_norm, modulated_rms_norm)


def _calls(package: Any, linear: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    same_arguments: dict[str, Callable[..., Any]] = {
        "layer_norm": lambda x, weight, bias, eps=1e-5: package.liger_layer_norm(x, weight, bias, eps),
        "dyt": lambda x, alpha, weight, bias: package.liger_dyt(x, alpha, weight, bias),
        "softmax": lambda x: package.liger_softmax(x),
        "sparsemax": lambda x: package.liger_sparsemax(x),
        "swiglu": lambda gate, up: package.liger_swiglu(gate, up),
        "relu_squared": lambda x: package.liger_relu_squared(x),
        "mix_streams": lambda x, pre: package.liger_mhc_pre(x, pre),
        "merge_streams": lambda x, y, post, res: package.liger_mhc_post_res(x, y, post, res),
    }

    def attention_residual(layers: Tensor, query: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
        # It expects a batch and a sequence dimension.
        return package.liger_attn_res(layers.unsqueeze(1), query, weight, eps).squeeze(0)

    def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Any:
        if approximate != "tanh":
            raise Unsupported("it has the tanh approximation only")
        return package.liger_geglu(gate, up)

    def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Any:
        return package.liger_cross_entropy(logits, target, **options)

    def experts(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Any:
        # The call of its LigerExperts. Its autotuner compiles 240 kernels for each size of the experts, which takes
        # minutes; LIGER_FUSED_MOE_AUTOTUNE=0 uses one configuration instead.
        return importlib.import_module("liger_kernel.ops").LigerFusedMoEFunction.apply(
            x, gate_up, down, index.int(), weight
        )

    def embedding(index: Tensor, weight: Tensor) -> Any:
        return importlib.import_module("liger_kernel.ops.experimental.embedding").LigerEmbeddingFunction.apply(
            weight, index
        )

    def scaled(*args: Any) -> Any:
        *most, return_entropy = args
        function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
        try:
            return function.apply(*most, return_entropy=return_entropy)
        except ImportError as error:
            # On Hopper it has only a CuTe kernel.
            raise Unsupported(f"its kernel for this device cannot be imported: {error}") from error

    losses = {
        "cross_entropy": _loss(cross_entropy),
        "linear_cross_entropy": linear,
        "linear_log_prob": _per_token(scaled),
    }
    rest = by_name(geglu, experts, embedding, attention_residual)
    return same_arguments | _row_ops(package) | rest | losses | _divergences(package)


def _divergences(package: Any) -> dict[str, Callable[..., Any]]:
    """Return the divergences that the library has.

    Those on logits apply the softmax first, as its users do. The mean is over rows, as in the op.
    """

    def linear_divergence(
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        kind: str = "forward_kl",
        beta: float = 0.5,
        temperature: float = 1.0,
    ) -> Any:
        share = teacher_share(kind, beta)
        return package.liger_fused_linear_jsd(
            hidden, weight, teacher_hidden, teacher_weight, shift_labels=None, jsd_beta=share, temperature=temperature
        )

    def kl_div(student: Tensor, teacher: Tensor, reverse: bool = False, temperature: float = 1.0) -> Any:
        if reverse:
            raise Unsupported("its first argument gets the gradient, which in the reverse KL is the other one")
        log_q, log_p = (torch.log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
        return package.liger_kl_div(log_q, log_p, reduction="batchmean", log_target=True)

    def jsd(student: Tensor, teacher: Tensor, beta: float = 0.5, temperature: float = 1.0) -> Any:
        log_q, log_p = (torch.log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
        return package.liger_jsd(log_q, log_p, shift_labels=None, beta=beta)

    def total_variation(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Any:
        q, p = (torch.softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
        return package.liger_tvd(q, p, shift_labels=None, reduction="batchmean")

    return by_name(linear_divergence, kl_div, jsd, total_variation)


def _soft_labels(package: Any) -> dict[str, Callable[..., Any]]:
    """Return its fused linear KL divergence from the teacher's probabilities, which are computed first."""

    def linear_divergence(
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        kind: str = "forward_kl",
        temperature: float = 1.0,
    ) -> Any:
        if kind != "forward_kl":
            raise Unsupported("it has the forward KL only")
        with torch.no_grad():
            teacher = torch.softmax((teacher_hidden @ teacher_weight.t()).float() / temperature, dim=-1)
        return package.liger_fused_linear_kl_div(
            hidden, weight, teacher, reduction="batchmean", temperature=temperature
        )

    return by_name(linear_divergence)


def _chunks() -> dict[str, Callable[..., Any]]:
    """Return its per-token loss in plain PyTorch, 512 tokens at a time, which it runs everywhere but on Hopper."""

    def chunked(*args: Any) -> Any:
        return importlib.import_module(
            "liger_kernel.ops.fused_linear_scaled_cross_entropy"
        )._FusedLinearPPOFallbackFunction.apply(*args)

    return {"linear_log_prob": _per_token(chunked)}


def _per_token(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return linear_log_prob as a call of a function with the same arguments, in order.

    The function returns negative log-likelihoods, alone or with entropies.
    """

    def linear_log_prob(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        return_entropy: bool = False,
    ) -> Any:
        with_one_target(hidden, target)
        result = function(hidden, weight, target, temperature, ignore_index, return_entropy)
        return (-result[0], result[1]) if isinstance(result, tuple) else -result

    return linear_log_prob


def _loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return its cross_entropy under the names of Liger's options."""

    def cross_entropy(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
    ) -> Any:
        options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return function(logits, target, **options, lse_square_scale=z_loss, softcap=softcap, reduction=reduction)

    return cross_entropy


def _variant(package: Any, **extra: Any) -> Callable[..., Any]:
    return partial(_linear, partial(package.liger_fused_linear_cross_entropy, **extra))


def _linear(
    function: Callable[..., Any],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Any:
    """Call its linear_cross_entropy with Liger's options."""
    options: dict[str, Any] = {
        "bias": bias,
        "ce_weight": class_weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    return function(hidden, weight, target, **options, lse_square_scale=z_loss, softcap=softcap, reduction=reduction)


def _cute() -> dict[str, Callable[..., Any]]:
    """Return calls of its dispatcher that name the CuTe implementation and therefore never fall back silently."""
    dispatched = importlib.import_module("liger_kernel.functional")
    sm90 = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    name = {"impl": "nvidia-cutedsl"}

    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, cast: str = "input") -> Any:
        return dispatched.rms_norm(
            x, weight, eps, offset=weight_offset, casting_mode=_casting(cast), in_place=False, **name
        )

    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0, cast: str = "input"
    ) -> Any:
        return dispatched.fused_add_rms_norm(x, residual, weight, eps, weight_offset, _casting(cast), False, **name)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return dispatched.rope(q, k, cos[None] if cos.dim() == 2 else cos, sin[None] if sin.dim() == 2 else sin, **name)

    def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Any:
        return dispatched.cross_entropy(logits, target, **options, **name)[0]

    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean"
    ) -> Any:
        return sm90.liger_fused_linear_cross_entropy_sm90(hidden, weight, target, ignore_index, reduction)

    same_arguments: dict[str, Callable[..., Any]] = {
        "layer_norm": lambda x, weight, bias=None, eps=1e-5: dispatched.layer_norm(x, weight, bias, eps, **name),
        "swiglu": lambda gate, up: dispatched.swiglu(gate, up, **name),
        "geglu": lambda gate, up: dispatched.geglu(gate, up, **name),
    }
    calls = by_name(rms_norm, add_rms_norm, rope, linear_cross_entropy)
    return same_arguments | calls | {"cross_entropy": _loss(cross_entropy)}
