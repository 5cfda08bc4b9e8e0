# SPDX-License-Identifier: Apache-2.0
"""LoRA: a linear layer with an adapter beside it, as PEFT wraps one, whether the layer itself is plain or quantized.

Adapters can be switched, disabled and merged at any time, so each call looks at what is active, and what the op does not compute
runs the module's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as global_hooks

from liger_core import lora_linear
from liger_hf.passing import hooked
from liger_hf.patch import forward_of, replacement
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, device_of, of_length, replica, sized, trial

NOTHING = "no module is a linear layer with a LoRA adapter, as PEFT wraps one"
OP = "lora_linear"
# Sizes of the stand-in.
INNER, OUTER, RANK = 24, 40, 8
# Fake tensors stand for plain ones when a training run is planned.
PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor})


class Adapter(NamedTuple):
    """The one active adapter of a module."""

    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module
    scale: float


def look(module: nn.Module) -> Found | None:
    parts = module._modules
    adapters = [parts.get(name) for name in ("lora_A", "lora_B", "lora_dropout")]
    if not all(isinstance(part, nn.ModuleDict) and len(part) for part in adapters):
        return None
    base = parts.get("base_layer")
    # PEFT adapts a parameter of any module, too; what that module does with it is its own matter.
    if base is None or hasattr(module, "parameter_name") or not isinstance(getattr(module, "scaling", None), dict):
        return None
    original = forward_of(module)
    if isinstance(original, str):
        return Found(OP, refusal=original)
    adapter = active_adapter(module)
    if isinstance(adapter, str):
        return Found(OP, refusal=adapter)
    if hasattr(adapter.a.weight, "ds_id"):
        return Found(OP, refusal="ZeRO-3 has sharded its adapter, and brings it to PEFT's own forward alone")
    weight = next((p for p in base.parameters() if p.is_floating_point()), adapter.a.weight)
    narrow = adapter.a.weight.dtype == weight.dtype
    plain = type(base) is nn.Linear
    bias = getattr(base, "bias", None) is not None
    return Found(
        OP,
        kind=(type(module), type(base), weight.dtype, adapter.a.weight.dtype, type(adapter.dropout), bias, str(weight.device)),
        original=original,
        candidates=lambda: [_candidate(original)],
        cases=lambda device, dtypes: _cases(module, plain, bias, narrow, device, dtypes),
        device=lambda: device_of(module),
        dtype=weight.dtype,
    )


def active_adapter(module: Any) -> Adapter | str:
    """The adapter that the op computes, or why it does not."""
    names = [name for name in module.active_adapters if name in module.lora_A]
    if len(names) != 1:
        return f"it has {len(names)} active adapters, and the op computes one"
    (name,) = names
    variant = getattr(module, "lora_variant", {}).get(name)
    if variant is not None or getattr(module, "use_dora", {}).get(name):
        kind = "DoRA" if variant is None else type(variant).__name__.removesuffix("LinearVariant")
        return f"its adapter is a variant of LoRA, {kind}"
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None or b.bias is not None:
        return "its adapter does not consist of two Linear without bias"
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"its adapter has a {type(dropout).__name__}"
    if hooked(a) or hooked(b) or hooked(dropout):
        return "its adapter has hooks, which have to run"
    return Adapter(a, b, dropout, module.scaling[name])


def _candidate(original: Callable[..., Any]) -> Candidate:
    def forward(self: Any, x: Any, *args: Any, **options: Any) -> Any:
        adapter = None if args or any(v is not None for v in options.values()) else _computed(self, x)
        y = None if adapter is None else _adapted(self.base_layer, x, adapter)
        return original(self, x, *args, **options) if y is None else y

    return Candidate(lora_linear, "", forward, lambda module: [replacement(module, forward, original)])


def _computed(module: Any, x: Any) -> Adapter | None:
    """What this call adds to the layer, if the op computes it."""
    if module.disable_adapters or module.merged or not getattr(module, "cast_input_dtype_enabled", True):
        return None
    if global_hooks._has_any_global_hook():
        return None
    adapter = active_adapter(module)
    if isinstance(adapter, str) or not _is_plain(x) or not (_is_plain(adapter.a.weight) and _is_plain(adapter.b.weight)):
        return None
    dtype, own = adapter.a.weight.dtype, _dtype_of(x)
    if dtype != adapter.b.weight.dtype or dtype not in (own, torch.float32) or not x.is_floating_point():
        return None
    # A float32 adapter beside float64, which only an exact run has.
    return None if own == torch.float64 != dtype else adapter


def _dtype_of(x: Tensor) -> torch.dtype:
    """The dtype in which a layer computes."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _is_plain(tensor: Any) -> bool:
    """A whole tensor on this device: not a DTensor, not quantized, gathered by no hook of ZeRO-3, brought by none of accelerate."""
    return type(tensor) in PLAIN and not (hasattr(tensor, "ds_id") or tensor.is_meta)


def _adapted(base: Any, x: Tensor, adapter: Adapter) -> Tensor | None:
    """The layer with its adapter; None if the layer does not return a tensor that one can be added to."""
    a, b, scale = adapter.a.weight, adapter.b.weight, adapter.scale
    dropout: Any = adapter.dropout
    if type(dropout) is nn.Dropout and dropout.training and dropout.p > 0.0:
        # The factor 1 / (1 - p) belongs to the scale: in bfloat16 it would round x.
        kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - dropout.p)
        scale = scale / (1.0 - dropout.p) if dropout.p < 1.0 else 0.0
        return _added(base(x), torch.where(kept, x, 0.0), a, b, scale)
    own = _is_plain(base.weight) and _dtype_of(base.weight) == _dtype_of(x) if type(base) is nn.Linear else False
    if own and not hooked(base):
        return lora_linear(x, base.weight, a, b, scale, bias=base.bias)
    return _added(base(x), x, a, b, scale)


def _added(own: Any, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor | None:
    # A router returns a tuple.
    return lora_linear(x, None, a, b, scale, base=own) if _is_plain(own) and own.dtype in (_dtype_of(x), torch.float32) else None


class _Opaque(nn.Linear):
    """Stands in for a layer that only its own forward can compute."""


def _cases(module: nn.Module, plain: bool, bias: bool, narrow: bool, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    draw = Draw(device)
    layers = {"base": draw.linear(INNER, OUTER, bias), "a": draw.linear(INNER, RANK, False), "b": draw.linear(RANK, OUTER, False)}

    def run(x: Tensor, upstream: Tensor) -> Run:
        return _run(module, layers, plain, torch.float32 if x.dtype == torch.bfloat16 and not narrow else x.dtype, x, upstream)

    x, upstream = draw.normal(2, 9, INNER), draw.normal(2, 9, OUTER)
    for name, dtype, scale in sized(dtypes):
        yield Case(name, dtype, run((x * scale).to(dtype), upstream.to(dtype)))
    for length in LENGTHS:
        yield of_length(length, torch.float32, run(draw.normal(1, length, INNER), draw.normal(1, length, OUTER)))


def _run(module: Any, layers: dict[str, nn.Linear], plain: bool, adapter: torch.dtype, x: Tensor, upstream: Tensor) -> Run:
    """A pass through a twin of the module with these layers, whose adapter is active, in this dtype and without dropout."""
    name = next(name for name in module.active_adapters if name in module.lora_A)

    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        base, a, b = (
            replica(layer, parameters={n: weights[f"{part}.{n}"] for n, _ in layer.named_parameters()}) for part, layer in layers.items()
        )
        if not plain:
            base.__class__ = _Opaque
        children = {"base_layer": base, "lora_A": {name: a}, "lora_B": {name: b}, "lora_dropout": {name: nn.Identity()}}
        made = {n: nn.ModuleDict(part) if isinstance(part, dict) else part for n, part in children.items()}
        twin = replica(module, children=made)
        twin._disable_adapters, twin.merged_adapters, twin.scaling = False, [], {name: 0.5}
        return {"output": function(twin, inputs["x"])}

    weights = {
        f"{part}.{n}": p.detach().to(x.dtype if part == "base" else adapter) for part, layer in layers.items() for n, p in layer.named_parameters()
    }  # fmt: skip
    return trial(call, {"x": x}, {"output": upstream}, weights)


RULE = Rule("lora", look, (OP,), NOTHING)
