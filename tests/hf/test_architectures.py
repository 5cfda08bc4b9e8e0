# SPDX-License-Identifier: Apache-2.0
"""A patched model computes what the plain one computes, for every architecture."""

import pytest
import torch

import liger_hf
from hf import tiny_models
from hf.tiny_models import (
    ARCHITECTURES,
    VOCABULARY,
    LargestResult,
    disagreements,
    exact_step,
    make,
    pair,
    pair_of,
    step,
    step_disagreements,
    tokens,
    twin,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


def test_loss_and_gradients_are_as_accurate_as_those_of_the_unpatched_model(architecture: str) -> None:
    assert step_disagreements(*pair(architecture)) == {}


def test_in_every_precision_the_same_is_replaced_and_logits_in_evaluation_are_those_of_the_unpatched_model(
    architecture: str,
) -> None:
    replaced = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        patched, plain = pair_of(make(architecture, dtype).eval())
        replaced.append(patched.liger_report.replaced)
        models = patched, plain, twin(plain).double()
        with torch.no_grad():
            # Several losses, since the error of a single one may be small by chance.
            results = [[model(**tokens(seed=seed)) for seed in range(4)] for model in models]
        assert isinstance(results[0][0].logits, torch.Tensor)
        joined = [{name: torch.stack([o[name] for o in each]) for name in ("loss", "logits")} for each in results]
        assert disagreements(*joined) == {}
    assert replaced == replaced[:1] * 3


# Heads without options, with a softcap, and with a scale.
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite"])
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
    patched, plain = pair_of(make(architecture).eval())
    ids = tokens()["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(patched.generate(ids, **options), plain.generate(ids, **options))
