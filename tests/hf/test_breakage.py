# SPDX-License-Identifier: Apache-2.0
"""What is known to break when models are patched: one fact each, from threads of users; other files go into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import liger_hf
from hf import two_ranks
from hf.test_training import accuracy, history
from hf.tiny_models import VOCABULARY, checkpoint_layers, disagreements, exact_step, make, step, tokens, twin

pytestmark = pytest.mark.cpu


def pair(architecture: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """A model and its patched copy, both training."""
    plain = make(architecture, dtype, **options).train()
    patched = twin(plain)
    liger_hf.apply(patched)
    return patched, plain


def same(patched: Any, plain: Any, **inputs: Any) -> bool:
    return disagreements(step(patched, **inputs), step(plain, **inputs), exact_step(plain, **inputs)) == {}


# -- evaluation and labels


@pytest.mark.parametrize("options", [{}, {"eval_accumulation_steps": 1}, {"use_cache": False}], ids=str)
def test_metrics_get_the_logits_of_an_evaluation(options: dict[str, Any], tmp_path: Path) -> None:
    patched, plain = pair()
    _, metrics = history(patched, tmp_path, compute_metrics=accuracy, **options)
    _, expected = history(plain, tmp_path, compute_metrics=accuracy, **options)
    assert metrics.keys() == {"eval_loss", "eval_accuracy"}
    assert metrics == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("keep", [1, 5])
def test_logits_to_keep_is_honoured_while_training(keep: int) -> None:
    patched, plain = pair()
    inputs = tokens()
    inputs = {
        "input_ids": inputs["input_ids"],
        "shift_labels": inputs["input_ids"][:, -keep:].contiguous(),
        "logits_to_keep": keep,
    }
    inputs["labels"] = inputs["shift_labels"]
    assert patched(**inputs).logits.shape == (2, keep, VOCABULARY)
    assert same(patched, plain, **inputs)


@pytest.mark.parametrize("items", [None, 13, torch.tensor(13)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_items_of_an_accumulated_batch_and_shifted_labels_count_as_in_the_plain_loss(items: Any, shifted: bool) -> None:
    patched, plain = pair()
    inputs: dict[str, Any] = tokens()
    if shifted:
        inputs["shift_labels"] = inputs["labels"].roll(-3, 1)
    if items is not None:
        inputs["num_items_in_batch"] = items
    assert same(patched, plain, **inputs)


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    patched, plain = pair()
    losses, _ = history(patched, tmp_path, gradient_accumulation_steps=4)
    assert losses == pytest.approx(history(plain, tmp_path, gradient_accumulation_steps=4)[0], abs=2e-4)


# -- heads


def with_lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(5)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    ).train()


def test_lora_on_the_head_is_trained() -> None:
    plain = with_lora(make(tie_word_embeddings=False), target_modules=["lm_head"])
    patched = twin(plain)
    assert liger_hf.apply(patched).replaced["linear_cross_entropy"] == 1
    gradients = {name: value for name, value in step(patched, **tokens()).items() if "lora_" in name}
    assert len(gradients) == 2
    assert all(float(value.abs().max()) > 0 for value in gradients.values())
    assert same(patched, plain, **tokens())


def test_a_head_among_modules_to_save_is_trained() -> None:
    plain = with_lora(make(tie_word_embeddings=False), target_modules=["q_proj"], modules_to_save=["lm_head"])
    patched = twin(plain)
    assert liger_hf.apply(patched).replaced["linear_cross_entropy"] == 1
    gradient = step(patched, **tokens())["base_model.model.lm_head.modules_to_save.default.weight"]
    assert float(gradient.abs().max()) > 0
    assert same(patched, plain, **tokens())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_embeddings_get_the_gradients_of_both_uses(tied: bool) -> None:
    assert same(*pair(tie_word_embeddings=tied), **tokens())


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_of_a_model_in_few_bits_are_trained(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    make(tie_word_embeddings=False).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    results = []
    for patch in (False, True):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
        )
        model = with_lora(model, target_modules=["q_proj", "down_proj"])
        if patch:
            assert liger_hf.apply(model).replaced == {
                "rms_norm": 5,
                "add_rms_norm": 2,
                "rope": 2,
                "swiglu": 2,
                "linear_cross_entropy": 1,
                "lora_linear": 4,
            }
        results.append(step(model, **tokens()))
    expected, got = results
    assert sum("lora_" in name for name in got) == 8
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5)


def test_a_model_on_several_devices_keeps_its_loss_and_gradients() -> None:
    plain = make(tie_word_embeddings=False).train()
    patched = twin(plain)
    # What a device_map does: a hook on every part brings its inputs to the device of its weights, here the only one
    # that there is.
    for module in (patched.model.embed_tokens, *patched.model.layers, patched.model.norm, patched.lm_head):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert liger_hf.apply(patched).replaced["linear_cross_entropy"] == 1
    assert same(patched, plain, **tokens())


def test_replicas_of_data_parallel_are_refused_with_a_sentence() -> None:
    # What DataParallel does to a model for more than one GPU.
    patched, plain = pair()
    plain._replicate_for_data_parallel()
    with pytest.raises(
        liger_hf.ModelError, match=r"one process each, .*DataParallel .*; start with torchrun or accelerate launch"
    ):
        patched._replicate_for_data_parallel()
    patched.liger_report.undo()
    patched._replicate_for_data_parallel()


# -- sharded models


def fsdp1(rank: int, store: str, patch: bool) -> None:
    import torch.distributed as dist

    from liger_core import use

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=two_ranks.PATIENCE)
    model = make(tie_word_embeddings=False).train()
    expected = step(twin(model), **tokens())["loss"]
    with use("reference"):
        if patch:
            liger_hf.apply(model)
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        loss = wrapped(**tokens()).loss
        loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
    assert sum(float(p.grad.abs().sum()) for p in wrapped.parameters() if p.grad is not None) > 0
    dist.destroy_process_group()


@pytest.mark.slow
def test_fsdp1_has_the_whole_head_within_the_forward(tmp_path: Path) -> None:
    two_ranks.on_two_ranks(fsdp1, str(tmp_path / "store"), True)


# -- the rest


def test_norms_one_after_the_other_do_not_overwrite_what_a_backward_needs() -> None:
    # Gemma 2 norms what it adds to the residual, which was normed before.
    patched, plain = pair("gemma2")
    assert same(patched, plain, **tokens())
    once = step(patched, **tokens())
    patched.zero_grad()
    loss = patched(**tokens()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in patched.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_logits_in_bfloat16_are_as_accurate_as_those_of_the_unpatched_model(architecture: str) -> None:
    patched, plain = pair(architecture, torch.bfloat16)
    with torch.no_grad():
        results, expected, exact = (
            model.eval()(tokens()["input_ids"]).logits for model in (patched, plain, twin(plain).double())
        )
    assert disagreements({"logits": results}, {"logits": expected}, {"logits": exact}) == {}


def test_reentrant_checkpointing_hands_hidden_states_over_by_position() -> None:
    patched, plain = pair()
    inputs = tokens()
    expected, exact = step(plain, **inputs), exact_step(plain, **inputs)
    checkpoint_layers(patched, True)
    patched.enable_input_require_grads()
    assert disagreements(step(patched, **inputs), expected, exact) == {}


def test_kernels_that_transformers_has_put_in_are_left_and_named() -> None:
    class HubNorm(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    from types import MethodType

    model = make()
    model._use_kernels = True
    model.model.norm.forward = MethodType(HubNorm.forward, model.model.norm)
    report = liger_hf.apply(model)
    assert report.notes[0].startswith("The model was loaded with use_kernels=True")
    reasons = {row.pattern: row.reason for row in report.rows}
    assert reasons["model.norm"] == f"its forward was already replaced on this instance by {__name__}"
