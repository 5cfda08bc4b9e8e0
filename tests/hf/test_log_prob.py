# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of heads that are not a plain Linear: frozen, tied, adapted, quantized; compiled, checkpointed,
accumulated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor, nn

import liger_hf.trl
from hf.test_heads import QUANTIZED
from hf.tiny_models import VOCABULARY, LargestResult, adapted, gradients_of, make, tokens, twin
from liger_core import DtypeError, OptionError, TargetError, losses
from liger_core.losses import Head
from liger_hf import head_log_prob

OPTIONS: dict[str, Any] = {"temperature": 0.7, "softcap": 5.0, "logit_scale": 0.5}


def body(model: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Hidden states, and the token after each of them."""
    model = model.get_base_model() if hasattr(model, "peft_config") else model
    hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
    return hidden, nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)


def by_module(model: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
    found = head_log_prob(model.get_output_embeddings(), *body(model, **inputs), return_entropy=True, **OPTIONS)
    assert isinstance(found, tuple)
    return found


def by_trl(model: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
    hidden, target = body(model, **inputs)
    counted, (temperature, softcap, scale) = target != -100, OPTIONS.values()
    given = hidden[counted], model.get_output_embeddings().weight, None, target[counted]
    options = temperature, 512, softcap, scale, ("log_probs", "entropy")
    found = liger_hf.trl._Function(torch.autograd.Function).apply(*given, *options)[:2]
    return tuple(value.new_zeros(target.shape).masked_scatter(counted, value) for value in found)  # type: ignore[union-attr,return-value]


def plainly(model: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
    hidden, target = body(model, **inputs)
    logits = model.get_output_embeddings()(hidden).float() * OPTIONS["logit_scale"]
    log = (OPTIONS["softcap"] * (logits / OPTIONS["softcap"]).tanh() / OPTIONS["temperature"]).log_softmax(-1)
    counted = target != -100
    return log.gather(-1, target.clamp(min=0)[..., None])[..., 0] * counted, -(log.exp() * log).sum(-1) * counted


def step(model: Any, way: Callable[..., tuple[Tensor, Tensor]], **inputs: Any) -> dict[str, Tensor]:
    """The results, and the gradient of everything that is trained; each token has a weight of its own, as with
    advantages."""
    results = way(model, **inputs)
    weights = torch.randn(2, *results[0].shape, generator=torch.Generator().manual_seed(5)).to(results[0].device)
    model.zero_grad()
    sum((w * result).sum() for w, result in zip(weights, results, strict=True)).backward()
    return {"log_prob": results[0].detach(), "entropy": results[1].detach(), **gradients_of(model)}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_one() -> None:
    plain = make(tie_word_embeddings=False, vocab_size=4096).train()
    plain.lm_head.requires_grad_(False)
    plain.model.embed_tokens.requires_grad_(False)
    ours = twin(plain)
    with LargestResult() as largest:
        got = step(ours, by_module, **tokens())
    assert "lm_head.weight" not in got
    assert largest.elements < 4096 * 64
    assert_same(got, step(plain, plainly, **tokens()))


def untied() -> Any:
    return make(tie_word_embeddings=False, intermediate_size=128)


# Of these, the op computes the chunks.
PLAIN: dict[str, Callable[[], Any]] = {
    "untied": lambda: untied().train(),
    "tied": lambda: make(tie_word_embeddings=True).train(),
    "saved_beside_adapters": lambda: adapted(untied(), "q_proj", modules_to_save=["lm_head"]),
    "tied_and_saved": lambda: adapted(make(tie_word_embeddings=True), "q_proj", modules_to_save=["lm_head"]),
}
HEADS: dict[str, Callable[[], Any]] = {
    **PLAIN,
    "adapted": lambda: adapted(untied(), "lm_head"),
    "adapted_and_tied": lambda: adapted(make(tie_word_embeddings=True), "lm_head"),
    "adapted_by_dora": lambda: adapted(untied(), "lm_head", use_dora=True),
    **{kind: lambda quantize=quantize: quantize(untied()).train() for kind, quantize in QUANTIZED.items()},
    **{
        f"{kind}_and_adapted": lambda quantize=quantize: adapted(quantize(untied()), "lm_head")
        for kind, quantize in QUANTIZED.items()
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_what_is_trained_gets_the_gradients_of_plain_pytorch_from_a_head_or_its_chunks(
    kind: str, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(liger_hf.rules.head.causal_loss.CHUNK_ELEMENTS, place.type, 16 * VOCABULARY)
    plain, inputs = HEADS[kind](), tokens(batch=4, length=50)
    with LargestResult() as largest:
        got = step(twin(plain), by_module, **inputs)
    # The head's own weight, which some libraries dequantize, is 64 wide.
    assert kind in PLAIN or largest.elements < 200 * VOCABULARY
    trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert got.keys() - {"log_prob", "entropy"} == trained
    assert_same(got, step(plain, plainly, **inputs))


def test_trl_runs_with_a_weight_that_dequantizes_itself() -> None:
    plain = QUANTIZED["torchao_int8"](untied()).train()
    assert_same(step(twin(plain), by_trl, **tokens()), step(plain, plainly, **tokens()))


def test_a_quantized_weight_is_an_error_of_the_op_that_says_what_to_do() -> None:
    model = QUANTIZED["torchao_int8"](untied()).train()
    message = (
        r"^linear_log_prob: tensors must be plain, got weight as Int8Tensor; pass what its dequantize\(\) returns$"
    )
    hidden, target = body(model, **tokens())
    with pytest.raises(DtypeError, match=message):
        Head(hidden, model.get_output_embeddings().weight, target).log_prob()


@pytest.mark.parametrize("kind", ["bitsandbytes_4bit", "bitsandbytes_8bit"])
def test_a_weight_of_packed_integers_is_an_error_that_says_what_to_do(kind: str) -> None:
    model = QUANTIZED[kind](untied()).train()
    message = r"^use_in_trl: the head's weight must have a floating dtype, got torch\.u?int8; leave lm_head out of "
    with pytest.raises(OptionError, match=message):
        by_trl(model, **tokens())


@pytest.mark.cpu
def test_a_head_on_the_disk_passes_gradients_on_to_the_adapters(tmp_path: Path) -> None:
    plain = adapted(make(tie_word_embeddings=False), "q_proj")
    ours = twin(plain)
    options = {"main_device": "cpu", "offload_dir": str(tmp_path), "force_hooks": True}
    dispatch_model(ours.base_model.model, {"": "cpu", "lm_head": "disk"}, **options)
    assert ours.get_output_embeddings().weight.is_meta
    assert_same(step(ours, by_module, **tokens()), step(plain, plainly, **tokens()))


def test_several_targets_and_temperatures_of_tokens_reach_another_head() -> None:
    model = adapted(make(tie_word_embeddings=False), "lm_head")
    hidden, target = body(model, **tokens())
    several = torch.stack((target, target.roll(1, -1).abs() % VOCABULARY), -1)
    temperature = torch.linspace(0.4, 1.6, target.numel(), device=target.device).reshape(target.shape)
    head = model.get_output_embeddings()
    log = (head(hidden) / temperature[..., None]).log_softmax(-1)
    several = torch.where(several == -100, 7, several)
    expected = torch.where(several == 7, 0.0, log.gather(-1, several))
    got = head_log_prob(head, hidden, several, temperature=temperature, ignore_index=7)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.cpu
def test_another_head_has_the_errors_of_the_op() -> None:
    model = adapted(make(tie_word_embeddings=False), "lm_head")
    hidden, target = body(model, **tokens())
    message = r"^linear_log_prob: every target must be in \[0, 300\) or ignore_index=-100, got 300$"
    with pytest.raises(TargetError, match=message):
        head_log_prob(model.get_output_embeddings(), hidden, torch.full_like(target, 300))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "adapted"])
def test_the_loss_compiles_as_one_graph(kind: str) -> None:
    model = make(tie_word_embeddings=False).train()
    model = model if kind == "plain" else adapted(model, "lm_head")
    hidden, target = (tensor.detach() for tensor in body(model, **tokens()))
    head = model.get_output_embeddings()

    def loss(x: Tensor) -> Tensor:
        log_prob = head_log_prob(head, x, target)
        assert isinstance(log_prob, Tensor)
        return losses.grpo(log_prob, None, x.new_tensor([1.0, -0.5]), mask=target != -100)[0]

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = hidden.clone().requires_grad_()
        value = function(x)
        value.backward()
        results.append((value.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
