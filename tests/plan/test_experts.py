# SPDX-License-Identifier: Apache-2.0
"""Plans of models whose experts Transformers runs through its experts interface, as grouped matmuls."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf.tiny_configs import VOCABULARY, tiny_config
from liger_train.plan.devices import replace as replaced
from liger_train.plan.step import predict
from liger_train.runs.data import _train_tokenizer
from plan.measuring import measured_bytes, tiny


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "liger"), [("fp32", "all"), ("bf16", "none")])
def test_a_prediction_for_experts_is_the_peak_of_the_trainer(precision: str, liger: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny_config("mixtral")).save_pretrained(tmp_path)
    _train_tokenizer(["some text"], VOCABULARY).save_pretrained(tmp_path)
    setup = replace(tiny(precision=precision, liger=liger), model=str(tmp_path))
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
