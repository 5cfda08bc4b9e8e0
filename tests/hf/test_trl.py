# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers run with the ops of the layers and keep the fused head that they bring."""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import liger_hf
import liger_hf.trl
from hf.tiny_models import VOCABULARY, losses_of, make, recorded

trl = pytest.importorskip("trl", reason="needs trl and datasets: pip install trl")
datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.slow, pytest.mark.cpu]
LAYERS = {"rms_norm": 5, "add_rms_norm": 2, "rope": 2, "swiglu": 2}
SETTINGS: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-3, "report_to": [],
    "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def sentence(seed: int, count: int = 6) -> str:
    ids = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def of_rows(rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer(), **options}


def sft(model: Any, folder: Path, **options: Any) -> Any:
    rows = [{"text": sentence(i, 5 + i % 3)} for i in range(8)]
    return trl.SFTTrainer(model, trl.SFTConfig(str(folder), **SETTINGS), **of_rows(rows, **options))


def dpo(model: Any, folder: Path, reference: Any = None, **options: Any) -> Any:
    rows = [
        {"prompt": sentence(i), "chosen": " " + sentence(i + 50), "rejected": " " + sentence(i + 90)} for i in range(8)
    ]
    reference = reference or make(tie_word_embeddings=False)
    return trl.DPOTrainer(model, reference, trl.DPOConfig(str(folder), **SETTINGS), **of_rows(rows, **options))


def grpo(model: Any, folder: Path, **options: Any) -> Any:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    rows = [{"prompt": sentence(i)} for i in range(8)]
    config = trl.GRPOConfig(str(folder), **SETTINGS, num_generations=2, max_completion_length=4, beta=0.0)
    return trl.GRPOTrainer(model, reward, config, **of_rows(rows, **options))


def kto(model: Any, folder: Path, **options: Any) -> Any:
    rows = [{"prompt": sentence(i), "completion": " " + sentence(i + 50), "label": i % 2 == 0} for i in range(8)]
    config, reference = trl.KTOConfig(str(folder), **SETTINGS), make(tie_word_embeddings=False)
    return trl.KTOTrainer(model, reference, config, **of_rows(rows, **options))


TRAINERS: dict[str, Callable[..., Any]] = {"sft": sft, "dpo": dpo, "grpo": grpo, "kto": kto}


def history(trainer: Any) -> list[float]:
    torch.manual_seed(0)
    trainer.train()
    return losses_of(trainer)


@cache
def unpatched(name: str) -> tuple[list[float], Any]:
    """Return the losses of a trainer of the unpatched model, and the trained model."""
    model = make(tie_word_embeddings=False).train()
    with TemporaryDirectory() as folder:
        return history(TRAINERS[name](model, Path(folder))), model


@pytest.mark.parametrize("first", ["apply", "trainer"])
@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_a_trainer_of_trl_has_the_losses_of_the_unpatched_model_and_keeps_its_head(
    name: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = unpatched(name)
    patched = make(tie_word_embeddings=False).train()
    if first == "apply":
        liger_hf.apply(patched)
    callback = liger_hf.LigerCallback(show=None)
    trainer = TRAINERS[name](patched, tmp_path, callbacks=[callback] if first == "trainer" else [])
    assert patched.liger_report.replaced == {**LAYERS, "linear_cross_entropy": 1}
    seen = recorded(monkeypatch, trl.trainer.utils._ChunkedLogProbFunction, "apply")
    losses = history(trainer)
    assert seen != []
    assert len(losses) == 2
    assert losses == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_of_trl_runs_on_our_head_and_comes_to_the_same_weights(name: str, tmp_path: Path) -> None:
    expected, plain = unpatched(name)
    other = make(tie_word_embeddings=False).train()
    with pytest.MonkeyPatch.context() as patched, liger_hf.use_in_trl():
        calls = recorded(patched, liger_hf.trl, "linear_log_prob")
        losses = history(TRAINERS[name](other, tmp_path))
    assert calls != []
    assert losses == pytest.approx(expected, abs=1e-5)
    for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
ASKED = (OUTPUTS, ("log_probs",), ("log_probs", "entropy"), ("log_probs", "is_top1"))
OPTIONS = {"plain": (1.0, None, 1.0), "temperature, softcap and scale": (0.7, 5.0, 0.5)}


@pytest.mark.parametrize("asked", ASKED, ids="+".join)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_our_head_gives_trl_what_its_own_gives(asked: tuple[str, ...], options: tuple[Any, ...]) -> None:
    temperature, softcap, scale = options
    targets = torch.randint(50, (7,))
    bias = torch.randn(50)

    def call(function: Any) -> tuple[list[Any], tuple[torch.Tensor, ...]]:
        torch.manual_seed(3)
        hidden, weight = torch.randn(7, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
        found = function.apply(hidden, weight, bias, targets, temperature, 32, softcap, scale, asked)
        loss = sum((i + 1) * value.sum() for i, value in enumerate(found[:2]) if value is not None)
        return list(found), torch.autograd.grad(loss, (hidden, weight))

    expected = call(trl.trainer.utils._ChunkedLogProbFunction)
    with liger_hf.use_in_trl():
        got = call(trl.trainer.utils._ChunkedLogProbFunction)
    assert [v is None for v in got[0]] == [v is None for v in expected[0]]
    for ours, theirs in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_float32_head_gets_logits_that_are_not_rounded() -> None:
    hidden, weight = torch.randn(7, 64).bfloat16(), torch.randn(50, 64).bfloat16()
    targets = torch.randint(50, (7,))
    with liger_hf.use_in_trl():
        found = trl.trainer.utils._ChunkedLogProbFunction.apply(hidden.float(), weight, None, targets, 1.0, 32)[0]
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)


def test_our_head_keeps_at_most_a_gibibyte_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    # It does not know the device meta.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    hidden, weight = (
        torch.empty(n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (8192, 1 << 18)
    )
    targets, sizes = torch.empty(8192, dtype=torch.int64, device="meta"), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t)
    with hooks, liger_hf.use_in_trl():
        trl.trainer.utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32)
    assert 1 << 29 < max(sizes) <= 1 << 30


def test_a_head_of_trl_that_was_there_before_is_left_and_named() -> None:
    model = make(tie_word_embeddings=False)
    trl.trainer.utils.add_fused_lm_head(model)
    report = liger_hf.apply(model)
    assert report.replaced == LAYERS
    (reason,) = (row.reason for row in report.rows if row.op == "linear_cross_entropy")
    assert reason == "its forward was already replaced on this instance, by code in trl.trainer.utils"


def test_undo_at_the_end_leaves_a_trainer_of_trl_as_it_was(tmp_path: Path) -> None:
    model = make(tie_word_embeddings=False).train()
    trainer = sft(model, tmp_path, callbacks=[liger_hf.LigerCallback(undo=True, show=None)])
    trainer.train()
    assert [name for name, module in model.named_modules() if name and "forward" in vars(module)] == []
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] > 0


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
@pytest.mark.filterwarnings("ignore:.*use_liger_kernel:FutureWarning")
def test_use_liger_kernel_of_trl_puts_in_the_layers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[liger_hf.Report] = []
    expected, _ = unpatched("sft")
    monkeypatch.setitem(SETTINGS, "use_liger_kernel", True)
    with liger_hf.compat.install(show=reports.append):
        losses = history(sft(make(tie_word_embeddings=False).train(), tmp_path))
    assert [report.replaced for report in reports] == [LAYERS]
    assert losses == pytest.approx(expected, abs=2e-4)


def test_the_layers_of_both_models_of_dpo_can_be_patched(tmp_path: Path) -> None:
    policy, reference = make(tie_word_embeddings=False).train(), make(tie_word_embeddings=False)
    for model in (policy, reference):
        liger_hf.apply(model)
    assert history(dpo(policy, tmp_path, reference=reference)) == pytest.approx(unpatched("dpo")[0], abs=2e-4)
