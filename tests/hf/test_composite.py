# SPDX-License-Identifier: Apache-2.0
"""Models of several parts: an eye or an encoder beside the language model."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, EncoderDecoderConfig, EncoderDecoderModel

import liger_hf
from hf.sweep import build, differences
from hf.tiny_configs import tiny_config
from hf.tiny_models import VOCABULARY, exact_step, pair_of, step, twin

pytestmark = pytest.mark.cpu

IMAGE = 5
# Four patches: a picture of 64 × 64 in patches of 32.
OPTIONS: dict[str, dict[str, Any]] = {
    "llava": {"image_token_index": IMAGE, "vision": {"image_size": 64}},
    "gemma3": {"image_token_index": IMAGE, "mm_tokens_per_image": 4, "vision": {"image_size": 64, "patch_size": 16}},
}


def problems(patched: Any, plain: Any, **inputs: Tensor) -> list[str]:
    """What differs in a training step; a gradient that is zero but for round-off is measured against the others."""
    results = (step(patched, **inputs), exact_step(plain, **inputs), step(plain, **inputs))
    return differences(
        *({name if name == "loss" else f"gradient of {name}": v for name, v in r.items()} for r in results)
    )


def seeing(model_type: str) -> tuple[Any, dict[str, Tensor]]:
    """A model with eyes, and inputs with one picture in each row."""
    options = dict(OPTIONS[model_type])
    vision = {**tiny_config(model_type).vision_config.to_dict(), **options.pop("vision")}
    model = AutoModelForImageTextToText.from_config(tiny_config(model_type, vision_config=vision, **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    ids = torch.randint(6, VOCABULARY, (2, 16), generator=generator)
    ids[:, 2:6] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    pixels = torch.randn(2, 3, 64, 64, generator=generator)
    inputs = {"input_ids": ids, "labels": labels, "pixel_values": pixels}
    if model_type == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return model.train(), inputs


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OPTIONS)
def test_a_model_with_pictures_trains_as_before(model_type: str) -> None:
    plain, inputs = seeing(model_type)
    patched = twin(plain)
    report = liger_hf.apply(patched)
    assert report.replaced["linear_cross_entropy"] == 1
    patterns = {row.pattern for row in report.rows if row.verdict == "replaced"}
    assert patterns >= {
        "(the model itself)",
        "model.language_model.layers.*.mlp",
        "model.vision_tower.encoder.layers.*.layer_norm1",
    }
    assert problems(patched, plain, **inputs) == []
    seen = [p.grad for name, p in patched.named_parameters() if "vision" in name and p.grad is not None]
    assert any(bool(gradient.any()) for gradient in seen)
    assert isinstance(patched(**inputs).logits, liger_hf.LazyLogits)


def test_a_head_that_belongs_to_an_inner_model_is_replaced_there() -> None:
    model = build("vision:llama4")
    rows = {row.module: row for row in liger_hf.apply(model).rows if row.op == "linear_cross_entropy"}
    assert rows["Llama4ForConditionalGeneration"].reason == "its head belongs to language_model, a separate model"
    assert rows["Llama4ForCausalLM"].verdict == "replaced"


def test_an_encoder_and_a_decoder_of_two_models_train_as_before() -> None:
    decoder = tiny_config("gpt2", add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(tiny_config("bert"), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    patched, plain = pair_of(EncoderDecoderModel(config).train())
    assert patched.liger_report.replaced.keys() >= {"layer_norm", "linear_cross_entropy"}
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids}
    assert problems(patched, plain, **inputs) == []
