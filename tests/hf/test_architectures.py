# SPDX-License-Identifier: Apache-2.0
"""A patched model computes what the plain one computes, for every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_hf
from hf import tiny_models
from hf.test_breakage import pair
from hf.tiny_models import (
    ARCHITECTURES,
    LAYERS,
    VOCABULARY,
    LargestResult,
    disagreements,
    exact_step,
    make,
    patched_twin,
    step,
    step_disagreements,
    tokens,
    twin,
)

pytestmark = pytest.mark.slow

NORMS = {"qwen3": 4 * LAYERS + 1, "gemma2": 4 * LAYERS + 1}


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": torch.tensor(37)}], ids=["mean", "accumulated"])
def test_loss_and_gradients_are_as_accurate_as_those_of_the_unpatched_model(
    architecture: str, items: dict[str, Any]
) -> None:
    patched, plain = pair(architecture)
    assert step_disagreements(patched, plain, **tokens(), **items) == {}


def test_the_precision_of_a_model_does_not_decide_what_is_replaced(architecture: str) -> None:
    replaced = [
        liger_hf.apply(make(architecture, dtype)).replaced for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    assert replaced == replaced[:1] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_in_evaluation_are_those_of_the_unpatched_model(architecture: str, dtype: torch.dtype) -> None:
    plain = make(architecture, dtype).eval()
    patched = patched_twin(plain)
    inputs = tokens()
    with torch.no_grad():
        results, expected, exact = (model(**inputs) for model in (patched, plain, twin(plain).double()))
    assert isinstance(results.logits, torch.Tensor)
    values = [{"loss": o.loss, "logits": o.logits} for o in (results, expected, exact)]
    assert disagreements(*values) == {}


def test_a_training_step_makes_no_tensor_of_all_the_logits(architecture: str) -> None:
    # More rows than the hidden sizes, so that no gradient of a weight is as large; a chunk of the loss is a part of the
    # rows.
    inputs = tokens(batch=4, length=50)
    model = make(architecture, tie_word_embeddings=False).train()
    rows = inputs["input_ids"].numel()
    with LargestResult() as plain:
        step(model, **inputs)
    assert plain.elements >= rows * VOCABULARY
    liger_hf.apply(model)
    with pytest.MonkeyPatch.context() as patch, LargestResult() as lean:
        patch.setattr("liger_core.ops.head.loop.CPU_BYTES", 16 * VOCABULARY * 4)
        step(model, **inputs)
    assert lean.elements < rows * VOCABULARY


def test_bfloat16_training_is_as_accurate_as_the_unpatched_model() -> None:
    patched, plain = pair("llama", torch.bfloat16)
    inputs = tokens(batch=4, length=24)
    assert step_disagreements(patched, plain, **inputs) == {}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_autocast_training_stays_within_the_noise_of_autocast(architecture: str) -> None:
    patched, plain = pair(architecture)
    inputs = tokens(batch=4, length=24)
    exact = exact_step(plain, **inputs)
    with torch.autocast(tiny_models.DEVICE.type, dtype=torch.bfloat16):
        result, expected = step(patched, **inputs), step(plain, **inputs)

    def distance(one: dict[str, torch.Tensor]) -> float:
        return max(float((one[name] - exact[name]).norm() / exact[name].norm()) for name in exact)

    assert distance(result) <= 1.1 * distance(expected)


def test_generated_tokens_are_the_same(architecture: str) -> None:
    plain = make(architecture).eval()
    patched = patched_twin(plain)
    ids = tokens()["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(patched.generate(ids, **options), plain.generate(ids, **options))
