# SPDX-License-Identifier: Apache-2.0
"""Plans of models whose experts Transformers runs through its experts interface, as grouped matmuls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hf.tiny_configs import TYPES, VOCABULARY, tiny_config
from liger_train.plan.devices import replace as replaced
from liger_train.plan.step import predict
from liger_train.runs.data import _train_tokenizer
from plan.measuring import measured_bytes, tiny

# The number of tokens that their attention selects is a value, which fake tensors do not have.
READS_VALUES = ("qwen4_exp", "qwen4_exp_text")
# A type of Transformers 5.23 whose parts must agree in sizes that tiny_config chooses one by one.
NOT_BUILT = ("dots3_note",)


def has_experts(model_type: str) -> bool:
    name = model_type_to_module_name(model_type)
    source = Path(transformers.__file__).parent / "models" / name / f"modeling_{name}.py"
    return source.exists() and "@use_experts_implementation" in source.read_text()


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", [t for t in TYPES if has_experts(t) and t not in READS_VALUES + NOT_BUILT])
def test_mixed_precision_can_be_planned_for_every_model_with_experts(model_type: str, tmp_path: Path) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    setup = replace(tiny(batch=1, sequence=8, liger="none", precision="bf16"), model=str(tmp_path))
    found = predict(setup)
    # Weights and gradients in float32, and the two moments of AdamW; what text does not reach is frozen.
    assert found.peak_bytes > 16 * found.trainable_parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_prediction_for_experts_is_the_peak_of_the_trainer(precision: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny_config("mixtral")).save_pretrained(tmp_path)
    _train_tokenizer(["some text"], VOCABULARY).save_pretrained(tmp_path)
    setup = replace(tiny(precision=precision), model=str(tmp_path))
    assert predict(setup).peak_bytes == pytest.approx(measured_bytes(setup), rel=0.02)


ENDS = torch.tensor([16, 16, 48], dtype=torch.int32)
LAYOUTS = {
    "rows by matrices": ((48, 16), (3, 16, 32), ENDS),
    "matrices by columns": ((3, 32, 16), (16, 48), ENDS),
    "a sum for each group": ((32, 48), (48, 16), ENDS),
    "batches": ((3, 32, 16), (3, 16, 64), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_grouped_matmul_is_planned_as_its_kernel_allocates(layout: str, dtype: torch.dtype) -> None:
    left, right, ends = LAYOUTS[layout]
    a, b = torch.randn(left, dtype=dtype), torch.randn(right, dtype=dtype)
    real = torch.nn.functional.grouped_mm(a, b, offs=ends)
    planned = replaced("cpu", torch.ops.aten._grouped_mm.default, (a, b, ends), {})
    assert (planned.shape, planned.stride(), planned.dtype) == (real.shape, real.stride(), real.dtype)
    assert planned.untyped_storage().nbytes() == real.untyped_storage().nbytes()
