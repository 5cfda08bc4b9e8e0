# SPDX-License-Identifier: Apache-2.0
"""LoRA and DoRA: a linear layer that PEFT wraps with an adapter; the layer itself may be quantized.

Adapters can be switched, disabled and merged at any time. Each call therefore checks which adapter is active, and runs
the module's own forward if the op cannot compute it.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_core import lora_linear
from liger_core.private_torch import FakeTensor, has_global_hook
from liger_hf.four_bits import dequantized_again, four_bit_dtype
from liger_hf.passing import hooked
from liger_hf.patch import forward_of, replacement
from liger_hf.private_transformers import ADAPTERS_DISABLED
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.stand_in import Case, Draw, Run, device_of, replica, row_cases, trial

NOTHING = "no module is a linear layer with a LoRA adapter, as PEFT wraps one"
OP = "lora_linear"
# An attribute of the forwards that this rule installs.
ADAPTED = "__liger_adapted__"
# Sizes of the stand-in.
INNER, OUTER, RANK = 24, 40, 8
# Fake tensors stand for plain ones when a training run is planned.
PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor})
# Classes of quantized weights that PEFT dequantizes for DoRA, by name: bitsandbytes may not be installed.
QUANTIZED = ("Params4bit", "Int8Params")
# The elements of a weight whose row norms DoRA computes at once, in float32.
NORM_ELEMENTS = 1 << 24


class Adapter(NamedTuple):
    """The only active adapter of a module; DoRA has a magnitude for each output."""

    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module
    scale: float
    magnitude: Tensor | None = None


def look(module: nn.Module) -> Found | None:
    children = module._modules
    adapters = [children.get(name) for name in ("lora_A", "lora_B", "lora_dropout")]
    if not all(isinstance(child, nn.ModuleDict) and len(child) for child in adapters):
        return None
    base = children.get("base_layer")
    # PEFT also adapts single parameters of modules, whose use of them is unknown.
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
    kinds = (weight.dtype, adapter.a.weight.dtype)
    narrow = kinds[0] == kinds[1]
    # A layer in 4 bits is computed by the op in training, and computes itself in evaluation.
    ways = [False, True] if four_bit_dtype(base) is not None else [type(base) is nn.Linear]
    bias = getattr(base, "bias", None) is not None
    dora = adapter.magnitude is not None
    if dora and not _is_readable(base):
        return Found(
            OP, refusal=f"its adapter is DoRA, which needs the norms of its weight, a {type(base.weight).__name__}"
        )
    return Found(
        OP,
        kind=(type(module), type(base), *kinds, type(adapter.dropout), bias, dora, str(weight.device)),
        original=original,
        candidates=lambda: [_candidate(original)],
        cases=lambda device, dtypes: chain.from_iterable(
            _cases(module, plain, bias, narrow, device, dtypes) for plain in ways
        ),
        device=lambda: device_of(module),
        dtype=weight.dtype,
    )


def active_adapter(module: Any) -> Adapter | str:
    """Return the adapter that the op computes, or the reason why it cannot."""
    names = [name for name in module.active_adapters if name in module.lora_A]
    if len(names) != 1:
        return f"it has {len(names)} active adapters, and the op computes one"
    (name,) = names
    variant = getattr(module, "lora_variant", {}).get(name)
    kind = type(variant).__name__.removesuffix("LinearVariant")
    if variant is not None and kind != "Dora":
        return f"its adapter is a variant of LoRA, {kind}"
    magnitude: Any = module.lora_magnitude_vector[name] if variant is not None else None
    scale = module.scaling[name]
    if isinstance(scale, Tensor):
        return "its scale is a tensor, as PEFT's prepare_model_for_compiled_hotswap makes it, and the op takes a number"
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None or b.bias is not None:
        return "its adapter does not consist of two Linear without bias"
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"its adapter has a {type(dropout).__name__}"
    if any(hooked(child) for child in (a, b, dropout, magnitude) if child is not None):
        return "its adapter has hooks, which have to run"
    return Adapter(a, b, dropout, scale, None if magnitude is None else magnitude.weight)


def _candidate(original: Callable[..., Any]) -> Candidate:
    def forward(self: Any, x: Any, *args: Any, **options: Any) -> Any:
        adapter = None if args or any(v is not None for v in options.values()) else computed(self, x)
        y = None if adapter is None else _adapted(self.base_layer, x, adapter)
        return original(self, x, *args, **options) if y is None else y

    forward.__dict__[ADAPTED] = True
    return Candidate(lora_linear, "", forward, lambda module: [replacement(module, forward, original)])


def computed(module: Any, x: Any) -> Adapter | None:
    """Return the active adapter if the op can compute this call, else None."""
    if module.disable_adapters or module.merged or not getattr(module, "cast_input_dtype_enabled", True):
        return None
    if has_global_hook():
        return None
    adapter = active_adapter(module)
    if (
        isinstance(adapter, str)
        or not _is_plain(x)
        or not (_is_plain(adapter.a.weight) and _is_plain(adapter.b.weight))
    ):
        return None
    dtype, compute_dtype = adapter.a.weight.dtype, _dtype_of(x)
    if dtype != adapter.b.weight.dtype or dtype not in (compute_dtype, torch.float32) or not x.is_floating_point():
        return None
    # Only the float64 run of a check has a float32 adapter beside float64.
    if compute_dtype == torch.float64 != dtype:
        return None
    if adapter.magnitude is not None and not (_is_plain(adapter.magnitude) and _is_readable(module.base_layer)):
        return None
    return adapter


def _dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype in which a layer computes: that of autocast if enabled, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _is_plain(tensor: Any) -> bool:
    """Whether this is a whole tensor on its device: not a DTensor, quantized, sharded by ZeRO-3 or offloaded."""
    return type(tensor) in PLAIN and not (hasattr(tensor, "ds_id") or tensor.is_meta)


def _is_readable(base: Any) -> bool:
    """Return whether DoRA can read the weight of a layer."""
    return isinstance(base, nn.Linear) and (_is_plain(base.weight) or type(base.weight).__name__ in QUANTIZED)


def _adapted(base: Any, x: Tensor, adapter: Adapter) -> Tensor | None:
    """Return the output of the layer with its adapter; None if no adapter can be added to the layer's output."""
    a, b, scale = adapter.a.weight, adapter.b.weight, adapter.scale
    dropout: Any = adapter.dropout
    dropped = x
    factor = 1.0
    if drops(adapter):
        # The factor 1 / (1 - p) belongs to the scale: in bfloat16 it would round x.
        factor = 1.0 / (1.0 - dropout.p) if dropout.p < 1.0 else 0.0
        dropped = torch.where(torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - dropout.p), x, 0.0)
    includes_base = brings_weight(base, x)
    if adapter.magnitude is None:
        if includes_base and dropped is x:
            return lora_linear(x, weight_of(base), a, b, scale, bias=base.bias)
        return _added(base(x), dropped, a, b, scale * factor)
    weight = weight_of(base) if includes_base else _dequantized(base)
    columns = adapter.magnitude / _norms(weight, a, b, scale)
    if includes_base and dropped is x:
        return lora_linear(x, weight, a, b, scale, bias=base.bias, column_scale=columns)
    y = base(x)
    if dropped is x:
        return _added(y if base.bias is None else y - base.bias, x, a, b, scale, column_scale=columns, bias=base.bias)
    # As in PEFT: the layer takes all of x; the terms (c - 1) · layer and c · adapter take x after dropout.
    product = nn.functional.linear(dropped, weight.to(_dtype_of(x)))
    layer = torch.addcmul(y, product, (columns - 1.0) * factor)
    total = _added(layer, dropped, a, (columns[:, None] * b).to(b.dtype), scale * factor)
    return None if total is None else total.to(y.dtype)


def _added(base_output: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, **options: Any) -> Tensor | None:
    return lora_linear(x, None, a, b, scale, base=base_output, **options) if fits(base_output, x) else None


def drops(adapter: Adapter) -> bool:
    """Whether the adapter's dropout is active in this call."""
    dropout: Any = adapter.dropout
    return type(dropout) is nn.Dropout and dropout.training and dropout.p > 0.0


def brings_weight(base: Any, x: Tensor) -> bool:
    """Return whether the op also computes the layer itself."""
    dtype = _dtype_of(x)
    if type(base) is nn.Linear:
        return _is_plain(base.weight) and _dtype_of(base.weight) == dtype and not hooked(base)
    # bitsandbytes has kernels for the few rows of generation, and compiled graphs would keep dequantized weights.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    is_known = x.dtype == dtype == four_bit_dtype(base) and (base.bias is None or base.bias.dtype == dtype)
    return is_known and not hooked(base)


def weight_of(base: Any) -> Tensor:
    """Return the weight of a layer that brings it."""
    return base.weight if type(base) is nn.Linear else dequantized_again(base)


def fits(output: Any, x: Tensor) -> bool:
    """Whether an adapter can be added to the layer's output, which for a router is a tuple."""
    return _is_plain(output) and output.dtype in (_dtype_of(x), torch.float32)


def _dequantized(base: Any) -> Tensor:
    if _is_plain(base.weight):
        return base.weight
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(base).detach()


@torch.no_grad()
def _norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the norm of each row of weight + scale · b a, in float32, without a gradient, as the paper suggests."""
    wide = torch.promote_types(torch.float32, weight.dtype)
    a, b = a.to(wide), b.to(wide)
    rows = max(1, NORM_ELEMENTS // weight.shape[1])
    with torch.autocast(weight.device.type, enabled=False):
        return torch.cat(
            [
                torch.linalg.vector_norm(torch.addmm(block.to(wide), factor, a, alpha=scale), dim=1)
                for block, factor in zip(weight.split(rows), b.split(rows), strict=True)
            ]
        )


class _Opaque(nn.Linear):
    """A stand-in for a layer that only its own forward can compute."""


def _cases(
    module: nn.Module, plain: bool, bias: bool, narrow: bool, device: torch.device, dtypes: Iterable[torch.dtype]
) -> Iterator[Case]:
    draw = Draw(device)
    layers: dict[str, nn.Module] = {
        "base": draw.linear(INNER, OUTER, bias), "a": draw.linear(INNER, RANK, False),
        "b": draw.linear(RANK, OUTER, False),
    }  # fmt: skip
    magnitude: Any = module._modules.get("lora_magnitude_vector")
    if magnitude is not None and _active(module) in magnitude:
        layers["magnitude"] = replica(magnitude[_active(module)], parameters={"weight": draw.normal(OUTER).abs() + 0.5})

    return row_cases(partial(_run, module, layers, plain, narrow), draw, INNER, OUTER, dtypes)


def _active(module: Any) -> str:
    return next(name for name in module.active_adapters if name in module.lora_A)


def _run(module: Any, layers: dict[str, nn.Module], plain: bool, narrow: bool, x: Tensor, upstream: Tensor) -> Run:
    """Return a pass through a twin of the module with these layers and an active adapter, without dropout.

    narrow  whether the adapter's weights are in bfloat16 beside a layer in bfloat16
    """
    name, adapter = _active(module), torch.float32 if x.dtype == torch.bfloat16 and not narrow else x.dtype

    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        replicas = {
            role: replica(layer, parameters={n: weights[f"{role}.{n}"] for n, _ in layer.named_parameters()})
            for role, layer in layers.items()
        }
        if not plain:
            replicas["base"].__class__ = _Opaque
        children = {"lora_A": replicas["a"], "lora_B": replicas["b"], "lora_dropout": nn.Identity()}
        if "magnitude" in replicas:
            children["lora_magnitude_vector"] = replicas["magnitude"]
        adapters = {n: nn.ModuleDict({name: child}) for n, child in children.items()}
        twin = replica(module, children={"base_layer": replicas["base"], **adapters})
        setattr(twin, ADAPTERS_DISABLED, False)
        twin.merged_adapters, twin.scaling = [], {name: 0.5}
        return {"output": function(twin, inputs["x"])}

    weights = {
        f"{role}.{n}": p.detach().to(x.dtype if role == "base" else adapter) for role, layer in layers.items() for n,
        p in layer.named_parameters()
    }  # fmt: skip
    return trial(call, {"x": x}, {"output": upstream}, weights)


RULE = Rule("lora", look, (OP,), NOTHING)
