# SPDX-License-Identifier: Apache-2.0
"""The quantizer by which Transformers loads linear layers and experts in 4 bits, parameter by parameter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from liger_hf.four_bits import expert_matrices, hold_in_four_bits, packed, routers

# An attribute of a quantized parameter: it holds the matrices of experts.
EXPERTS = "liger_experts"


@contextmanager
def loading_in_four_bits() -> Iterator[None]:
    """Within this context, models that are loaded with bitsandbytes' 4 bits have their experts in 4 bits, too.

    Each parameter is quantized while it is loaded, a few experts at a time. The device holds at most one in 16 bits,
    and none in 16 bits from a checkpoint in MXFP4.
    """
    original = AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]
    AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = ExpertsQuantizer
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = original


class ExpertsQuantizer(Bnb4BitHfQuantizer):
    """bitsandbytes' quantizer of Transformers, which also quantizes the matrices of experts, but no router.

    It reads matrices in MXFP4, too, where the model's config has no quantization_config.
    """

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        is_matrix = _is_expert_matrix(model, param_name)
        return is_matrix or super().param_needs_quantization(model, param_name, **options)

    @staticmethod
    def get_modules_to_not_convert(model: Any, *options: Any, **named: Any) -> Any:
        return [*Bnb4BitHfQuantizer.get_modules_to_not_convert(model, *options, **named), *routers(model)]

    def get_weight_conversions(self) -> Any:
        mxfp4 = Mxfp4HfQuantizer(Mxfp4Config(dequantize=True), pre_quantized=True)
        return [*super().get_weight_conversions(), *mxfp4.get_weight_conversions()]

    def update_weight_conversions(self, *args: Any) -> Any:
        # Transformers 5.24 also passes the model.
        conversions = super().update_weight_conversions(*args)
        for conversion in conversions:
            if isinstance(conversion, WeightConverter) and _works_on_slices(conversion):
                conversion.__class__ = _InSlices
        return conversions

    def get_quantize_ops(self) -> Any:
        return _Quantize(self)

    def postprocess_model(self, model: Any, **options: Any) -> Any:
        for module in model.modules():
            for name in [name for name, p in module.named_parameters(recurse=False) if getattr(p, EXPERTS, False)]:
                hold_in_four_bits(module, name, getattr(module, name))
        return super().postprocess_model(model, **options)


class _InSlices(WeightConverter):
    """Converts a few experts at a time if they are quantized.

    Converting all experts of a layer at once takes several times their memory.
    """

    __slots__ = ()

    def convert(self, layer_name: str, model: Any = None, **options: Any) -> Any:  # type: ignore[override]
        quantize: Any = self.quantization_operation
        if quantize is None:
            return super().convert(layer_name, model, **options)
        self.quantization_operation = None
        tensors: Any = self.materialize_tensors()
        is_list = isinstance(self.operations[0], MergeModulelist)
        converted = super().convert

        def experts(rows: slice) -> Tensor:
            for name, values in tensors.items():
                self.collected_tensors[name] = values[rows] if is_list else [values[0][rows]]
            (value,) = converted(layer_name, model, **options).values()
            return value

        return quantize.convert({layer_name: experts}, model=model)


def _works_on_slices(conversion: Any) -> bool:
    """Whether a conversion makes the matrix of each expert from this expert's tensors alone."""
    first, *rest = conversion.operations
    return isinstance(first, MergeModulelist | Mxfp4Dequantize) and all(
        isinstance(operation, Concatenate) and operation.dim for operation in rest
    )


class _Quantize(Bnb4bitQuantize):
    """Quantizes one parameter of a layer when its values have been read."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], model: Any = None, **options: Any
    ) -> dict[str, Tensor]:
        experts = {name: value for name, value in input_dict.items() if _is_expert_matrix(model, name)}
        rest = {name: value for name, value in input_dict.items() if name not in experts}
        result: dict[str, Tensor] = super().convert(rest, model=model, **options) if rest else {}
        for name, value in experts.items():
            value = value[0] if isinstance(value, list) else value
            matrices = value.__getitem__ if isinstance(value, Tensor) else value
            parameter = model.get_parameter(name)
            result[name] = packed(matrices, parameter.shape, parameter.dtype)
            setattr(result[name], EXPERTS, True)
        return result


def _is_expert_matrix(model: Any, path: str) -> bool:
    module, _, name = path.rpartition(".")
    return name in expert_matrices(model.get_submodule(module))
