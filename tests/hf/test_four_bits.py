# SPDX-License-Identifier: Apache-2.0
"""Experts in 4 bits: as accurate as their dequantized matrices, which no backward pass keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import liger_hf
from hf.sweep import build
from hf.test_experts import LORA, TARGETS, gradients, loss
from hf.tiny_models import assert_same_step, checkpoint_layers, gradients_of, patched_twin, tokens, twin
from liger_core.accuracy import error
from liger_hf.four_bits import described, expert_matrices, in_four_bits, packed
from liger_hf.quantizer import loading_in_four_bits

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.cpu
CONFIG = {"r": 2, "lora_alpha": 6, "target_modules": [], "init_lora_weights": False}


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if expert_matrices(module) or in_four_bits(module)]


def adapted(model: Any, targets: str = "both", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with described(model):
        return peft.get_peft_model(model, peft.LoraConfig(**CONFIG, target_parameters=TARGETS[targets][0]))


def in_both_forms(model_type: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model with experts in 4 bits, and one with the dequantized matrices."""
    quantized = build(model_type).to(dtype).train()
    plain = twin(quantized)
    liger_hf.quantize_experts(quantized)
    for ours, theirs in zip(experts_of(quantized), experts_of(plain), strict=True):
        for name in in_four_bits(ours):
            getattr(theirs, name).data.copy_(getattr(ours, name))
    return quantized, plain


def matrices_kept(model: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors for the backward pass that have the size of all matrices of a layer."""
    sizes = {getattr(module, name).numel() for module in experts_of(model) for name in in_four_bits(module)}
    kept: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() in sizes and tensor.dtype != torch.uint8:
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(model)
    return kept


def test_every_matrix_of_experts_is_quantized_once_and_frozen() -> None:
    model = build("gpt_oss")
    wanted = sum(getattr(module, name).numel() for module in experts_of(model) for name in expert_matrices(module))
    assert liger_hf.quantize_experts(model) == wanted > 0
    assert liger_hf.quantize_experts(model) == 0
    stored = [p for module in experts_of(model) for p in module.parametrizations.parameters()]
    assert sum(p.numel() for p in stored) == wanted // 2
    assert {(p.dtype, p.requires_grad) for p in stored} == {(torch.uint8, False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 32, 64), (11, 24, 10), (3, 5, 7)], ids=["blocks", "block_of_two", "one_slice"])
def test_matrices_that_are_quantized_a_few_at_a_time_have_the_bits_of_the_whole(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    matrices = torch.randn(shape).to(dtype).requires_grad_()
    whole = pytest.importorskip("bitsandbytes").nn.Params4bit(matrices, quant_type="nf4").to("cpu")
    ours = packed(matrices.__getitem__, matrices.shape, dtype)
    assert torch.equal(ours, whole)
    got, expected = (one.quant_state.as_dict(packed=True) for one in (ours, whole))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.slow
@LORA
def test_adapters_have_the_gradients_of_dequantized_experts(model_type: str, targets: str, checkpointed: bool) -> None:
    ours, plain = (adapted(model, targets) for model in in_both_forms(model_type))
    report = liger_hf.apply(ours)
    assert report.replaced["experts"] == 2
    for model in (ours, plain):
        if checkpointed:
            model.enable_input_require_grads()
            checkpoint_layers(model)
    expected, got, again = gradients(plain), gradients(ours), gradients(ours)
    # Twice, since an adapter must be gone after each call.
    assert all(torch.equal(value, again[name]) for name, value in got.items())
    torch.testing.assert_close(loss(ours), loss(plain))
    assert len(got) == 2 * len(TARGETS[targets][1])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("with_adapters", [False, True], ids=["experts", "adapted_experts"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_no_backward_pass_keeps_a_dequantized_matrix(model_type: str, with_adapters: bool) -> None:
    model, _ = in_both_forms(model_type)
    model.enable_input_require_grads()
    model = adapted(model) if with_adapters else model
    assert matrices_kept(twin(model))
    liger_hf.apply(model)
    assert all(in_four_bits(module) for module in experts_of(model))
    assert not matrices_kept(model)


def test_the_rest_of_a_model_trains_on_experts_in_four_bits() -> None:
    quantized, plain = in_both_forms("qwen3_moe")
    for module in experts_of(plain):
        module.requires_grad_(False)
    assert_same_step(patched_twin(quantized), plain)


def test_in_bfloat16_gradients_are_as_close_to_float64_on_the_dequantized_matrices_as_those_of_peft() -> None:
    near = far = 0.0
    for seed in range(4):
        ours, plain = (adapted(model, seed=seed) for model in in_both_forms("mixtral", torch.bfloat16))
        exact = twin(plain).double()
        exact.base_model.model.set_experts_implementation("eager")
        wanted = gradients(exact)
        liger_hf.apply(ours, only=["experts"])
        near += sum(error(value, wanted[name]).frobenius for name, value in gradients(ours).items())
        far += sum(error(value, wanted[name]).frobenius for name, value in gradients(plain).items())
    # As for matrices in 16 bits: which of the two is nearer depends on the draw.
    assert near <= 1.1 * far


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True], ids=["sixteen_bits", "four_bits"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_that_transformers_runs_have_their_adapter_in_every_call(model_type: str, quantized: bool) -> None:
    plain = adapted(in_both_forms(model_type)[1])
    ours = adapted(in_both_forms(model_type)[0 if quantized else 1])
    liger_hf.apply(ours)
    ours.base_model.model.set_experts_implementation("batched_mm")
    for _ in range(2):
        torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-4, atol=1e-6)
    assert all(len(module.parametrizations.down_proj) == 1 for module in experts_of(ours) if quantized)


def test_an_adapter_of_experts_in_four_bits_is_one_of_experts_in_sixteen(tmp_path: Path) -> None:
    ours, plain = in_both_forms("qwen3_moe")
    ours = adapted(ours)
    liger_hf.apply(ours)
    ours.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(loss(loaded), loss(ours))
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(loss(merged), loss(ours))


def test_experts_are_quantized_while_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    with loading_in_four_bits():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four_bits, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four_bits, dtype=torch.float32)
    assert not any(in_four_bits(module) for module in after.modules())
    liger_hf.quantize_experts(after)
    assert len(experts_of(loaded)) == 2
    torch.testing.assert_close(loaded.state_dict(), after.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(loss(loaded), loss(after), rtol=0, atol=0)


def test_a_single_token_and_experts_without_tokens_have_gradients() -> None:
    ours, plain = (adapted(model) for model in in_both_forms("qwen3_moe"))
    liger_hf.apply(ours)
    for model in (ours, plain):
        model(input_ids=tokens()["input_ids"][:1, :1]).logits.sum().backward()
    torch.testing.assert_close(gradients_of(ours), gradients_of(plain), rtol=1e-4, atol=1e-6)


def test_undo_leaves_experts_in_four_bits_that_transformers_runs() -> None:
    model, plain = in_both_forms("mixtral")
    liger_hf.apply(model).undo()
    assert all(in_four_bits(module) and "forward" not in vars(module) for module in experts_of(model))
    torch.testing.assert_close(loss(model), loss(plain))


def test_experts_without_memory_are_refused() -> None:
    model = build("mixtral").to("meta")
    message = r"must be whole and in memory, got .*gate_up_proj on the meta device"
    with pytest.raises(liger_hf.ModelError, match=message):
        liger_hf.quantize_experts(model)


def test_biases_that_peft_has_made_float32_are_added_in_the_dtype_of_the_matrices() -> None:
    model, plain = in_both_forms("gpt_oss", torch.bfloat16)
    model.is_loaded_in_4bit = True
    model = adapted(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))
    assert experts_of(model)[0].down_proj_bias.dtype == torch.float32
    liger_hf.apply(model)
    ours, theirs = (loss(each).to(torch.bfloat16) for each in (model, adapted(plain)))
    torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0)


def test_a_report_says_that_experts_beside_layers_in_four_bits_are_not(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four_bits, dtype=torch.float32)
    sentence = "weights of experts are not in 4 bits"
    assert [sentence in note for note in liger_hf.inspect(model, verify=False).notes].count(True) == 1
    liger_hf.quantize_experts(model)
    assert not any(sentence in note for note in liger_hf.apply(model, verify=False).notes)
