# SPDX-License-Identifier: Apache-2.0
"""Ops and losses as modules, for models of your own.

Their options go to the constructor, their tensors to the call. Parameters have the initial values and the names in a `state_dict` that
they have in torch and in Transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from liger_core import losses, ops
from liger_core.errors import OptionError, nearest
from liger_core.layout import Layout
from liger_core.op import Op

# What a parameter of an op must be annotated with to belong to the call alone.
_TENSORS = ("Tensor", "Tensor | None")
_GATES: dict[str, Callable[..., Tensor]] = {"silu": ops.swiglu, "gelu_tanh": ops.geglu, "gelu": partial(ops.geglu, approximate="none")}


class FunctionModule(nn.Module):
    """A function without weights as a module: `module(tensors)` is `function(tensors, **options)`.

    An option that may be a tensor, as normalizer, may also be passed in the call.
    """

    function: ClassVar[Callable[..., Any]]
    tensors: ClassVar[tuple[str, ...]]
    known: ClassVar[Mapping[str, Any]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        _check(type(self).__name__, options, self.known)
        self.options = options

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(**{**self.options, **_named(self, self.tensors, inputs, named)})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class Norm(nn.Module):
    """An op on rows with weights of their width: `module(rows)` is `op(rows, weights, eps, **options)`.

    elementwise_affine  without it there are no weights
    bias                without it there is no bias, for an op that has one
    """

    op: ClassVar[Op[..., Any]]
    rows: ClassVar[tuple[str, ...]]
    weights: ClassVar[tuple[str, ...]]
    known: ClassVar[Mapping[str, Any]]
    weight: Any

    def __init__(
        self,
        width: int,
        eps: float | None = None,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check(type(self).__name__, options, self.known)
        self.width, self.eps, self.options = width, self.op.signature.parameters["eps"].default if eps is None else eps, options
        for name in self.weights:
            wanted = elementwise_affine and (bias or name != "bias")
            self.register_parameter(name, nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if wanted else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rows are scaled by 1, and no bias is added."""
        for name, weight in self.named_parameters(recurse=False):
            nn.init.constant_(weight, 0.0 if name == "bias" else 1.0 - self.options.get("weight_offset", 0.0))

    def forward(self, *rows: Tensor, **named: Tensor) -> Any:
        weights = {name: getattr(self, name) for name in self.weights}
        return self.op(**_named(self, self.rows, rows, named), **weights, eps=self.eps, **self.options)

    def extra_repr(self) -> str:
        return ", ".join([str(self.width), f"eps={self.eps}", *(f"{name}={value!r}" for name, value in self.options.items())])


class GroupNorm(nn.GroupNorm):
    """torch's module with the op `group_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class PolyNorm(nn.Module):
    """`poly_norm` with its weights, an activation; all powers begin with the same share, as in the paper."""

    def __init__(self, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.poly_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class DyT(nn.Module):
    """`dyt` with its weights, for the place of a norm; alpha begins at 0.5, as in the paper."""

    def __init__(
        self,
        width: int,
        alpha: float = 0.5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.first_alpha = alpha
        self.alpha = nn.Parameter(torch.empty(1, **place))
        self.weight = nn.Parameter(torch.empty(width, **place))
        self.bias = nn.Parameter(torch.empty(width, **place)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.first_alpha)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.dyt(x, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        return str(self.weight.shape[0])


class HyperConnection(nn.Module):
    """Hyper-connections around one layer, `module(x)` → (input of the layer, post, res) for streams x (..., streams, hidden_size).

    With them `merge_streams(x, layer(input), post, res)` is the next x. Weights are those of DeepSeek V4: `fn` projects the normalized
    streams, `base` is added and `scale` multiplies, for pre, post and res. Xie et al. 2025, arXiv:2512.24880.
    """

    def __init__(
        self,
        hidden_size: int,
        streams: int = 4,
        *,
        iterations: int = 20,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.streams, self.iterations, self.eps, self.norm_eps = hidden_size, streams, iterations, eps, norm_eps
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        count = (2 + streams) * streams
        self.fn = nn.Parameter(torch.empty(count, streams * hidden_size, **place))
        self.base = nn.Parameter(torch.empty(count, **place))
        self.scale = nn.Parameter(torch.empty(3, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.fn, std=0.02)
        nn.init.zeros_(self.base)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = self.streams
        sizes = [n, n, n * n]
        logits = ops.project_streams(x, self.fn, self.norm_eps)
        # float32, or float64 of streams in float64.
        factors, base = self.scale.to(logits.dtype).unbind(), self.base.to(logits.dtype).split(sizes)
        pre, post, res = (p * s + b for p, s, b in zip(logits.split(sizes, -1), factors, base, strict=True))
        # The rows of the matrix that is projected are the streams that give, those of res the streams that receive.
        res = ops.sinkhorn(res.unflatten(-1, (n, n)), self.iterations, self.eps).mT
        return ops.mix_streams(x, pre.sigmoid() + self.eps), 2 * post.sigmoid(), res

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, streams={self.streams}, iterations={self.iterations}"


class AttentionResidual(nn.Module):
    """`attention_residual` with its query, which begins as zeros, so that all layers count alike, and the weight of its keys' norm."""

    weight: nn.Parameter | None

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        *,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.register_parameter("weight", nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, layers: Tensor) -> Tensor:
        return ops.attention_residual(layers, self.query, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.query.shape[0]}, eps={self.eps}"


class QKNormRoPE(nn.Module):
    """Queries and keys normalized by `q_norm` and `k_norm`, as Transformers calls them, and rotated; see `qk_norm_rope`."""

    q_norm: Norm
    k_norm: Norm

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        *,
        interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.q_norm, self.k_norm = (RMSNorm(width, eps, device=device, dtype=dtype, **options) for _ in range(2))
        self.interleaved = interleaved

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.q_norm
        return ops.qk_norm_rope(
            q, k, norm.weight, self.k_norm.weight, cos, sin, norm.eps, interleaved=self.interleaved, **norm.options
        )  # fmt: skip


class GatedMLP(nn.Module):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`, with the names of Llama, or of Phi-3 if gate and up are packed.

    activation  "silu", "gelu_tanh" or "gelu"
    packed      gate and up are one Linear, `gate_up_proj`
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    gate_up_proj: nn.Linear

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Literal["silu", "gelu_tanh", "gelu"] = "silu",
        bias: bool = False,
        packed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _GATES:
            raise OptionError(f"GatedMLP: activation must be one of {', '.join(map(repr, _GATES))}, got {activation!r}")
        self.activation, self.packed = activation, packed
        place: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        for name in ("gate_up_proj",) if packed else ("gate_proj", "up_proj"):
            self.add_module(name, nn.Linear(hidden_size, (2 if packed else 1) * intermediate_size, **place))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        projected = (self.gate_up_proj(x),) if self.packed else (self.gate_proj(x), self.up_proj(x))
        result: Tensor = self.down_proj(_GATES[self.activation](*projected))
        return result

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class Embedding(nn.Embedding):
    """torch's module, with the gradient of `embedding`: summed in float32, in the same order in every run.

    Raises OptionError for max_norm, scale_grad_by_freq and sparse, which change the weights or what their gradient means.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        for name, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(self, name) != off:
                raise OptionError(f"Embedding: {name} must be {off}, got {getattr(self, name)!r}; use torch.nn.Embedding")

    def forward(self, index: Tensor) -> Tensor:
        return ops.embedding(index, self.weight, padding_idx=self.padding_idx)


class RotaryEmbedding(nn.Module):
    """The cos and sin that `rope` takes: `module(x, position_ids)` has the dtype of x, as in Transformers, and no entry in the `state_dict`.

    rotary       the number of columns that are rotated, even
    base         of the frequencies base^(-2i / rotary)
    interleaved  neighboring columns are a pair
    """

    def __init__(self, rotary: int, base: float = 10000.0, *, interleaved: bool = False) -> None:
        super().__init__()
        if rotary % 2 or rotary <= 0:
            raise OptionError(f"RotaryEmbedding: rotary must be even and > 0, got {rotary}")
        self.rotary, self.base, self.interleaved = rotary, base, interleaved

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # float32: bfloat16 has no 257th position. No buffer, which `module.bfloat16()` would round.
        frequencies = self.base ** (-torch.arange(0, self.rotary, 2, device=position_ids.device).float() / self.rotary)
        angle = position_ids[..., None].float() * frequencies
        angle = angle.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angle, angle), dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def function_module(name: str, function: Any) -> type[FunctionModule]:
    """The class of a function: parameters of the call are its tensors and what has no default."""
    parameters = inspect.signature(function).parameters.values()
    of_call = [p for p in parameters if p.default is p.empty or p.annotation in _TENSORS]
    options = {p.name: p for p in parameters if p not in of_call}
    body = {"function": function if isinstance(function, Op) else staticmethod(function), "tensors": tuple(p.name for p in of_call)}
    # The module that holds the class, where pickle looks for it.
    body["__module__"] = sys._getframe(1).f_globals["__name__"]
    return type(name, (FunctionModule,), {**_described(function, options.values()), **body, "known": options})


def norm_module(name: str, op: Op[..., Any]) -> type[Norm]:
    """The class of an op on rows: its layout says which arguments are rows and which are weights of their width."""
    assert isinstance(op.layout, Layout)
    of_width = {argument: dimensions == "(width)" for argument, dimensions in op.layout.arguments.items()}
    options = {p.name: p for p in op.signature.parameters.values() if p.name not in of_width and p.name != "eps"}
    body = {"op": op, "rows": tuple(a for a, own in of_width.items() if not own), "weights": tuple(a for a, own in of_width.items() if own)}
    return type(name, (Norm,), {"__doc__": op.__doc__, "__module__": __name__, **body, "known": options})


def _described(function: Any, options: Any) -> dict[str, Any]:
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in options]
    return {"__doc__": function.__doc__, "__signature__": inspect.Signature(keywords)}


def _named(module: nn.Module, names: tuple[str, ...], inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, be they passed by position or by name."""
    if len(inputs) > len(names):
        raise TypeError(f"{type(module).__name__}: the call must have at most {', '.join(names)}, got {len(inputs)} values")
    by_position = dict(zip(names, inputs, strict=False))
    for name in named:
        if name in by_position:
            raise TypeError(f"{type(module).__name__}: {name} must be given once, got it by position and by name")
    return by_position | named


def _check(name: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for option in options:
        if option not in known:
            words = f"be among {', '.join(known)}" if known else "be none"
            raise OptionError(f"{name}: options must {words}, got {option!r}.{nearest(option, known)}")


RMSNorm = norm_module("RMSNorm", ops.rms_norm)
AddRMSNorm = norm_module("AddRMSNorm", ops.add_rms_norm)
LayerNorm = norm_module("LayerNorm", ops.layer_norm)
AddLayerNorm = norm_module("AddLayerNorm", ops.add_layer_norm)
GatedRMSNorm = norm_module("GatedRMSNorm", ops.gated_rms_norm)
ModulatedRMSNorm = norm_module("ModulatedRMSNorm", ops.modulated_rms_norm)
ModulatedLayerNorm = norm_module("ModulatedLayerNorm", ops.modulated_layer_norm)

Softmax = function_module("Softmax", ops.softmax)
Sparsemax = function_module("Sparsemax", ops.sparsemax)
Sinkhorn = function_module("Sinkhorn", ops.sinkhorn)
ProjectStreams = function_module("ProjectStreams", ops.project_streams)
MixStreams = function_module("MixStreams", ops.mix_streams)
MergeStreams = function_module("MergeStreams", ops.merge_streams)
RoPE = function_module("RoPE", ops.rope)
SwiGLU = function_module("SwiGLU", ops.swiglu)
GeGLU = function_module("GeGLU", ops.geglu)
ReLUSquared = function_module("ReLUSquared", ops.relu_squared)

LogProb = function_module("LogProb", ops.linear_log_prob)
CrossEntropyLoss = function_module("CrossEntropyLoss", ops.cross_entropy)
LinearCrossEntropyLoss = function_module("LinearCrossEntropyLoss", ops.linear_cross_entropy)
LinearDivergenceLoss = function_module("LinearDivergenceLoss", ops.linear_divergence)
KLDivLoss = function_module("KLDivLoss", ops.kl_div)
JSDLoss = function_module("JSDLoss", ops.jsd)
TotalVariationLoss = function_module("TotalVariationLoss", ops.total_variation)

DPOLoss = function_module("DPOLoss", losses.dpo)
CPOLoss = function_module("CPOLoss", losses.cpo)
SimPOLoss = function_module("SimPOLoss", losses.simpo)
ORPOLoss = function_module("ORPOLoss", losses.orpo)
KTOLoss = function_module("KTOLoss", losses.kto)
GRPOLoss = function_module("GRPOLoss", losses.grpo)
PPOLoss = function_module("PPOLoss", losses.ppo)
DFTLoss = function_module("DFTLoss", losses.dft)
TopKDistillationLoss = function_module("TopKDistillationLoss", losses.topk_distillation)
CosineDistillationLoss = function_module("CosineDistillationLoss", losses.cosine_distillation)
