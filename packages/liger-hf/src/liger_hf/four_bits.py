# SPDX-License-Identifier: Apache-2.0
"""Experts in 4 bits: their matrices are bitsandbytes' parametrized parameters, in a loaded model or while one loads.

bitsandbytes and Transformers quantize linear layers only; Transformers 5 stores experts as parameters of three
dimensions, which stay in 16 bits.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from liger_core.autograd import made_again
from liger_hf.errors import ModelError

# The attributes by which Transformers' experts interface describes the weights.
DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
FORMAT = "nf4"
# bitsandbytes quantizes blocks of 64 values, or 128 on some GPUs. Its double quantization has blocks of 256 scales.
BLOCK, SCALES = 128, 256


def quantize_experts(model: nn.Module) -> int:
    """Quantize the matrices of all experts to NF4 with double quantization, in place; return how many weights they are.

    They are frozen from then on. The module computes as before, from matrices that are dequantized in each call; after
    `apply`, nothing dequantized is kept for the backward pass. The parameters are those of
    `bitsandbytes.nn.parametrize`, and reading one, such as `module.gate_up_proj`, dequantizes it. Call it before
    `prepare_model_for_kbit_training`, which would make experts in 16 bits float32.

    Raises ModelError if bitsandbytes is not installed, or experts are on the meta device or sharded.
    """
    count = 0
    for path, module in model.named_modules():
        for name in expert_matrices(module):
            weight = getattr(module, name)
            if weight.is_meta or hasattr(weight, "device_mesh") or hasattr(weight, "ds_id"):
                where = "on the meta device" if weight.is_meta else "sharded"
                raise ModelError(
                    f"liger_hf.quantize_experts: experts must be whole and in memory, got {path}.{name} {where}"
                )
            count += weight.numel()
            hold_in_four_bits(module, name, packed(weight.data.__getitem__, weight.shape, weight.dtype))
    return count


def declared(module: nn.Module) -> list[bool] | None:
    """Return the values of those attributes, or None if the module does not hold experts."""
    values = [value for name in DECLARED if isinstance(value := vars(module).get(name), bool)]
    return values if len(values) == len(DECLARED) else None


def expert_matrices(module: nn.Module) -> list[str]:
    """Return the names of the parameters that hold the matrices of a module of experts in floating point."""
    if declared(module) is None:
        return []
    return [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.is_floating_point()]


def routers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers beside experts that weight them: one output for each expert, or for all."""
    names = []
    for path, module in model.named_modules():
        bases = [_without_adapters(child) for child in module.children()]
        counts = {getattr(child, name).shape[0] for child in bases for name in expert_matrices(child)}
        for name, child in module.named_children() if counts else ():
            linear = [(inner, layer) for inner, layer in child.named_modules() if isinstance(layer, nn.Linear)]
            if len(linear) == 1 and linear[0][1].out_features in {1, *counts}:
                names.append(f"{path}.{name}.{linear[0][0]}".rstrip("."))
    return names


def _without_adapters(module: Any) -> Any:
    """Return what PEFT's wrappers of the parameters of a module are around."""
    return _without_adapters(module.base_layer) if hasattr(module, "base_layer") else module


@torch.no_grad()
def packed(matrices: Callable[[slice], Tensor], shape: torch.Size, dtype: torch.dtype) -> Any:
    """Return a parameter of bitsandbytes that holds the matrices of this shape, rounded to the dtype, in 4 bits.

    They are quantized a few at a time, to the same bits as the whole. `matrices` returns the matrices of a slice.
    """
    bitsandbytes = _bitsandbytes()
    functional = bitsandbytes.functional
    count, size = shape[0], shape[1:].numel()
    # No block spans two slices.
    step = BLOCK // gcd(BLOCK, size)
    codes: Any = None
    for start in range(0, count, step):
        slice_codes, state = functional.quantize_4bit(matrices(slice(start, start + step)).to(dtype), quant_type=FORMAT)
        if codes is None:
            codes = slice_codes.new_empty(-(-count * size // 2), 1)
            scales = state.absmax.new_empty(-(-count * size // state.blocksize))
        codes[start * size // 2 :][: len(slice_codes)] = slice_codes
        scales[start * size // state.blocksize :][: len(state.absmax)] = state.absmax
    offset = scales.mean()
    state.absmax, state.state2 = functional.quantize_blockwise(scales - offset, blocksize=SCALES)
    state.shape, state.offset, state.nested = shape, offset, True
    return bitsandbytes.nn.Params4bit(codes, quant_state=state, quant_type=FORMAT, bnb_quantized=True)


def hold_in_four_bits(module: nn.Module, name: str, weight: Any) -> None:
    """Make such a parameter one of the module that dequantizes itself where it is read."""
    setattr(module, name, nn.Parameter(weight.data, requires_grad=False))
    state = weight.quant_state.as_dict(packed=True)
    _bitsandbytes().nn.parametrize.replace_parameter_4bit_prequantized(module, name, state, weight.device)


def _bitsandbytes() -> Any:
    try:
        importlib.import_module("bitsandbytes.nn.parametrize")
    except ImportError as problem:
        raise ModelError(
            "liger_hf.quantize_experts: bitsandbytes 0.48 or later must be installed; pip install -U bitsandbytes"
        ) from problem
    return importlib.import_module("bitsandbytes")


def quantized(module: Any, name: str) -> Any:
    """Return the quantization state of a parameter that nothing but 4 bits parametrizes, else None."""
    if not parametrize.is_parametrized(module, name):
        return None
    steps = module.parametrizations[name]
    return getattr(steps[0], "quant_state", None) if len(steps) == 1 else None


def in_four_bits(module: nn.Module) -> list[str]:
    """Return the names of the parameters of a module that are in 4 bits."""
    return [name for name in getattr(module, "parametrizations", ()) if quantized(module, name) is not None]


def matrices_of(module: Any, name: str, transposed: bool) -> Tensor:
    """Return a parameter; if it is in 4 bits, dequantized, and no backward pass keeps it but dequantizes it again."""
    state = quantized(module, name)
    if state is None:
        matrices: Tensor = getattr(module, name)
        return matrices.mT if transposed else matrices
    return made_again(partial(_dequantized, module.parametrizations[name].original, state, transposed))


def four_bit_dtype(linear: Any) -> torch.dtype | None:
    """Return the dtype in which a linear layer of bitsandbytes dequantizes its weight and computes; else None."""
    state = getattr(linear.weight, "quant_state", None) if type(linear).__name__ == "Linear4bit" else None
    if state is None or state.dtype != linear.compute_dtype or getattr(state, "packing_format_for_cpu", False):
        return None
    return state.dtype


def dequantized_again(linear: Any) -> Tensor:
    """Return the dequantized weight of such a layer; no backward pass keeps it but dequantizes it again."""
    return made_again(partial(_dequantized, linear.weight.data, linear.weight.quant_state, False))


@torch.no_grad()
def _dequantized(packed: Tensor, state: Any, transposed: bool) -> Tensor:
    matrices: Tensor = importlib.import_module("bitsandbytes.functional").dequantize_4bit(packed, state)
    return matrices.mT if transposed else matrices


@contextmanager
def described(model: nn.Module) -> Iterator[None]:
    """Within this context, weights of experts in 4 bits look like parameters in 16 bits, which take no memory.

    PEFT then wraps experts in 4 bits as it wraps others, so an adapter of one is an adapter of the other, too.
    """
    quantized_modules: list[tuple[nn.Module, Any]] = [
        (module, module._modules["parametrizations"]) for module in model.modules() if in_four_bits(module)
    ]
    kinds = [type(module) for module, _ in quantized_modules]
    for module, parametrizations in quantized_modules:
        weights: Any = {}
        for name, steps in parametrizations.items():
            state = steps[0].quant_state
            zero = torch.zeros((), dtype=state.dtype, device=steps.original.device)
            weights[name] = nn.Parameter(zero.expand(state.shape), requires_grad=False)
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module._modules["parametrizations"]
        # The order of the class, which determines the nesting of PEFT's wrappers.
        module._parameters = {**weights, **module._parameters}
    try:
        yield
    finally:
        for (module, parametrizations), kind in zip(quantized_modules, kinds, strict=True):
            for name in parametrizations:
                del module._parameters[name]
            module._modules["parametrizations"] = parametrizations
            module.__class__ = kind


def is_described(weight: Tensor) -> bool:
    """Whether a weight is in 4 bits and looks like a parameter in 16 bits."""
    return weight.dim() == 3 and not any(weight.stride())
