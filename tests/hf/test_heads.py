# SPDX-License-Identifier: Apache-2.0
"""Heads that are not a plain Linear: tied, frozen, adapted, saved beside adapters, quantized, offloaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_hf
import liger_hf.rules.head.causal_loss
from hf.sweep import build
from hf.tiny_models import (
    VOCABULARY,
    LargestResult,
    adapted,
    disagreements,
    exact_step,
    gradients_of,
    make,
    pair_of,
    patched_twin,
    step,
    step_disagreements,
    tokens,
    twin,
)

# All but add_rms_norm: nothing passes over a norm on which accelerate has a hook.
UNDER_HOOKS = {"rms_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1}


KINDS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"use_dora": True}}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
@pytest.mark.parametrize("first", ["peft", "liger"])
def test_adapters_get_the_gradients_of_the_unpatched_model(target: str, first: str, kind: str, tied: bool) -> None:
    plain = adapted(make(tie_word_embeddings=tied), target, **KINDS[kind])
    if first == "peft":
        patched = patched_twin(plain)
    else:
        patched = adapted(patched_twin(make(tie_word_embeddings=tied)), target, **KINDS[kind])
    adapters = [value for name, value in step(patched, **tokens()).items() if "lora_" in name]
    assert len(adapters) >= 2
    assert all(float(value.abs().max()) > 0 for value in adapters)
    assert step_disagreements(patched, plain) == {}


def test_an_adapted_head_is_computed_in_chunks(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    patched = adapted(make(tie_word_embeddings=False), "lm_head")
    inputs = tokens(batch=4, length=50)
    report = liger_hf.apply(patched)
    assert report.replaced["linear_cross_entropy"] == 1
    monkeypatch.setitem(liger_hf.rules.head.causal_loss.CHUNK_ELEMENTS, place.type, 16 * VOCABULARY)
    with LargestResult() as largest:
        step(patched, **inputs)
    assert largest.elements < 200 * VOCABULARY


BESIDE: dict[str, tuple[bool, dict[str, Any], str]] = {
    "untied_head": (False, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tied_head": (True, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tokens_of_tied_embeddings": (True, {"trainable_token_indices": [3, 4, 5]}, "trainable_tokens"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "options", "name"), BESIDE.values(), ids=BESIDE)
def test_a_head_and_tokens_that_are_saved_beside_the_adapters_are_trained(
    tied: bool, options: dict[str, Any], name: str
) -> None:
    patched, plain = pair_of(adapted(make(tie_word_embeddings=tied), "q_proj", **options))
    assert any(name in trained for trained in step(patched, **tokens()))
    assert step_disagreements(patched, plain) == {}


def test_logits_of_an_adapted_head_cannot_be_read_after_its_adapters_were_updated() -> None:
    patched = adapted(make(tie_word_embeddings=False), "lm_head")
    liger_hf.apply(patched)
    outputs = patched(**tokens())
    outputs.loss.backward()
    torch.optim.SGD([p for p in patched.parameters() if p.requires_grad], lr=0.1).step()
    with pytest.raises(liger_hf.LogitsError, match="has been updated since the forward pass"):
        outputs.logits.argmax(-1)


@pytest.mark.cpu
def test_weights_that_accelerate_has_offloaded_are_used_where_its_hooks_bring_them() -> None:
    plain = make(tie_word_embeddings=False).train()
    patched = cpu_offload(twin(plain), execution_device=torch.device("cpu"))
    report = liger_hf.apply(patched)
    assert report.replaced == UNDER_HOOKS
    outputs, expected = patched(**tokens()), plain(**tokens())
    torch.testing.assert_close(outputs.loss, expected.loss)
    with torch.no_grad():
        torch.testing.assert_close(patched(**tokens()).logits, expected.logits)
    report.undo()
    torch.testing.assert_close(patched(**tokens()).loss, expected.loss)


@pytest.mark.cpu
def test_weights_that_an_offloaded_model_cannot_train_are_named() -> None:
    plain = make(tie_word_embeddings=False).train()

    def notes(model: Any) -> list[str]:
        return [note for note in liger_hf.apply(model).notes if "offloaded" in note]

    here = dispatch_model(twin(plain), {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)
    assert notes(here) == []
    (note,) = notes(cpu_offload(twin(plain), execution_device=torch.device("cpu")))
    weights = "21 weights that require a gradient (model.embed_tokens.weight)"
    assert note.startswith(f"accelerate has offloaded {weights}: they get none")
    assert notes(cpu_offload(plain.requires_grad_(False), execution_device=torch.device("cpu"))) == []


PLACES: dict[str, dict[str, str]] = {
    "head": {"": "cpu", "lm_head": "disk"},
    "second_half": dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), "cpu") | dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "disk"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("first", ["liger", "accelerate"])
def test_weights_on_the_disk_pass_gradients_on_to_the_adapters(
    first: str, places: dict[str, str], tmp_path: Path
) -> None:
    plain = adapted(make(tie_word_embeddings=False), "q_proj", layers_to_transform=[0])
    patched = twin(plain)
    inputs = tokens()
    expected, exact = step(plain, **inputs), exact_step(plain, **inputs)
    if first == "liger":
        liger_hf.apply(patched)
    dispatch_model(patched.base_model.model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    if first == "accelerate":
        assert liger_hf.apply(patched).replaced == UNDER_HOOKS | {"lora_linear": 1}
    assert patched.get_output_embeddings().weight.is_meta
    assert disagreements(step(patched, **inputs), expected, exact) == {}
    assert isinstance(patched(**inputs).logits, liger_hf.LazyLogits)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("first", ["liger", "accelerate"])
def test_a_model_over_two_gpus_has_the_gradients_of_one_that_is_not_split(first: str) -> None:
    plain = make(tie_word_embeddings=False).train()
    patched = twin(plain)
    inputs = tokens()
    if first == "liger":
        liger_hf.apply(patched)
    first_half = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), 0)
    dispatch_model(patched, first_half | dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), 1))
    if first == "accelerate":
        assert liger_hf.apply(patched).replaced == UNDER_HOOKS
    outputs = patched(**inputs)
    assert isinstance(outputs.logits, liger_hf.LazyLogits)
    assert outputs.logits.real is None
    assert step_disagreements(patched, plain, **inputs) == {}


def by_torchao(model: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def by_bitsandbytes(kind: str, **options: Any) -> Callable[[Any], Any]:
    def quantized(model: Any) -> Any:
        library = pytest.importorskip("bitsandbytes")
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                layer = getattr(library.nn, kind)(module.in_features, module.out_features, bias=False, **options)
                layer.load_state_dict(module.state_dict())
                model.set_submodule(name, layer.to(module.weight.device))
        return model

    return quantized


QUANTIZED: dict[str, Callable[[Any], Any]] = {
    "torchao_int8": by_torchao,
    "bitsandbytes_4bit": by_bitsandbytes("Linear4bit", compute_dtype=torch.float32, quant_type="nf4"),
    "bitsandbytes_8bit": by_bitsandbytes("Linear8bitLt", has_fp16_weights=False),
}


def assert_same(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Up to rounding: quantized weights have no float64 to compare with."""
    assert results.keys() == expected.keys()
    distances = {name: (results[name] - value).abs().max() / value.abs().max() for name, value in expected.items()}
    assert {name: distance for name, distance in distances.items() if not distance <= 1e-5} == {}


ADAPTED = {"no_adapter": None, "adapted_head": "lm_head", "adapted_attention": "q_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTED.values(), ids=ADAPTED)
@pytest.mark.parametrize("quantize", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_what_is_not_quantized_gets_the_gradients_of_the_unpatched_model(
    quantize: Callable[[Any], Any], adapter: str | None
) -> None:
    # On the CPU bitsandbytes takes widths that are multiples of its blocks.
    plain = quantize(make(tie_word_embeddings=False, intermediate_size=128)).train()
    if adapter is not None:
        plain = adapted(plain, adapter)
    patched = twin(plain)
    replaced = liger_hf.apply(patched).replaced
    assert (replaced["linear_cross_entropy"], replaced.get("lora_linear", 0)) == (1, 2 * (adapter == "q_proj"))
    inputs = tokens()
    expected = step(plain, **inputs)
    trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert trained
    assert expected.keys() == trained | {"loss"}
    assert_same(step(patched, **inputs), expected)
    assert isinstance(patched(**inputs).logits, liger_hf.LazyLogits)


HEADLESS = {
    "blt": ("BltPatcher", "its forward has neither labels nor a loss"),
    "prophetnet": ("ProphetNetForCausalLM", "its head must get output 0 of the base model, its forward uses output 1"),
}


@pytest.mark.parametrize("model_type", HEADLESS)
def test_the_report_says_what_a_model_has_instead_of_a_head_with_a_loss(model_type: str) -> None:
    report = liger_hf.apply(build(model_type), only=["linear_cross_entropy"])
    kind, reason = HEADLESS[model_type]
    assert [(row.verdict, row.reason) for row in report.rows if row.module == kind] == [("left", reason)]


# Outputs beside hidden states that a config asks of the base model, and outputs without names.
CONFIGURED: dict[str, tuple[str, dict[str, Any]]] = {
    "router_logits": ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    "router_logits_of_a_part": ("vision:qwen3_vl_moe", {"output_router_logits": True}),
    "hidden_states": ("llama", {"output_hidden_states": True}),
    "attentions": ("llama", {"_output_attentions": True, "_attn_implementation": "eager"}),
    # Of models in which it works in Transformers.
    "tuples": ("seq2seq:t5", {"return_dict": False}),
}


@pytest.mark.parametrize("case", CONFIGURED)
def test_a_head_is_replaced_whatever_else_the_config_makes_the_model_return(case: str, place: torch.device) -> None:
    model_type, options = CONFIGURED[case]
    plain = build(model_type).to(place).train()
    for name, value in options.items():
        for config in (plain.config, plain.config.get_text_config()):
            setattr(config, name, value)
    patched = twin(plain)
    assert liger_hf.apply(patched, only=["linear_cross_entropy"]).replaced == {"linear_cross_entropy": 1}
    results: list[Any] = []
    for model in (patched, plain):
        loss = model(**tokens())[0]
        loss.backward()
        results.append((loss, gradients_of(model)))
    torch.testing.assert_close(*results)


class ReadsItsLayers(LlamaForCausalLM):
    """A model whose forward reads attributes of the layers of its base model in every way that a list of modules has."""

    def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
        layers = self.model.layers
        widths = {layer.self_attn.head_dim for layer in (layers[0], *layers, *layers[-1:])}
        if not layers or not self.model or not self.model.layers[0] or len(layers) != 2 or len(widths) != 1:
            raise ValueError("it needs two layers of one width")
        hidden = self.model(input_ids=input_ids, **options).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def test_a_head_is_replaced_whatever_its_model_reads_of_the_layers_of_its_base_model() -> None:
    model = make().train()
    model.__class__ = ReadsItsLayers
    assert liger_hf.apply(model, only=["linear_cross_entropy"]).replaced == {"linear_cross_entropy": 1}
