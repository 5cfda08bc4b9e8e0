# SPDX-License-Identifier: Apache-2.0
"""TRL's distillation trainers compare hidden states: the same losses and weights, and no logits of either model."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_hf
from hf.test_trl import SETTINGS, sentence, tokenizer
from hf.tiny_models import make, twin
from liger_core import Unsupported

trl = pytest.importorskip("trl", reason="needs trl and datasets: pip install trl")
datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental':UserWarning"),
]
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def distillation(model: Any, teacher: Any, folder: Path, **settings: Any) -> Any:
    rows = datasets.Dataset.from_list([{"prompt": sentence(i, 3 + i % 3)} for i in range(8)])
    config = trl.DistillationConfig(str(folder), **{**SETTINGS, "max_completion_length": 5, **settings})
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer()}
    return trl.DistillationTrainer(model, teacher, config, **data)


def gkd(model: Any, teacher: Any, folder: Path, **settings: Any) -> Any:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    words = tokenizer()
    words.chat_template = CHAT
    chats = [
        [{"role": "user", "content": sentence(i)}, {"role": "assistant", "content": sentence(i + 50, 3 + i % 3)}]
        for i in range(8)
    ]
    rows = datasets.Dataset.from_list([{"messages": chat} for chat in chats])
    settings = {**SETTINGS, "max_new_tokens": 5, "max_length": 32, "lmbda": 0.5, "temperature": 0.9, **settings}
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": words}
    return GKDTrainer(model, teacher, GKDConfig(str(folder), **settings), **data)


TRAINERS = {"distillation": distillation, "gkd": gkd}


def history(trainer: Any) -> list[dict[str, float]]:
    random.seed(0)
    torch.manual_seed(0)
    trainer.train()
    names = {"loss", "eval_loss", "entropy"}
    return [{name: entry[name] for name in names & set(entry)} for entry in trainer.state.log_history]


def rows_of_logits(*models: Any) -> list[int]:
    """Return a list that gets the positions of a sequence at which a head computes logits; one when it generates."""
    positions: list[int] = []
    for model in models:
        model.lm_head.register_forward_hook(lambda head, args, logits: positions.append(logits.shape[1]))
    return positions


# A beta of 1 swaps the two sides of a beta of 0; of both trainers the divergence is ours.
@pytest.mark.parametrize(("name", "beta"), [("distillation", 0.3), ("gkd", 0.0), ("gkd", 0.3)])
def test_a_distillation_trainer_comes_to_the_same_weights_without_logits(
    name: str, beta: float, tmp_path: Path
) -> None:
    plain = make(tie_word_embeddings=False).train()
    teacher, other = make(hidden_size=96, tie_word_embeddings=False), twin(plain)
    settings = {"beta": beta, "gradient_accumulation_steps": 2, "eval_strategy": "steps"}
    positions = rows_of_logits(other, teacher)
    with liger_hf.use_in_trl():
        logs = history(TRAINERS[name](other, teacher, tmp_path, **settings))
    assert set(positions) <= {1}
    expected = history(TRAINERS[name](plain, teacher, tmp_path, **settings))
    assert logs == [pytest.approx(entry, rel=1e-4) for entry in expected]
    for ours, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_gkd_gives_logits_to_those_who_ask_for_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tie_word_embeddings=False)
    trainer = gkd(model, make(tie_word_embeddings=False), tmp_path)
    batch = next(iter(trainer.get_eval_dataloader()))
    expected = trainer.prediction_step(model, batch, prediction_loss_only=False)
    with liger_hf.use_in_trl():
        loss, logits, _ = trainer.prediction_step(model, batch, prediction_loss_only=False)
        alone, _, _ = trainer.prediction_step(model, batch, prediction_loss_only=True)
        # As on a GPU, where TRL passes only the rows that count to the head.
        monkeypatch.setattr(trl.trainer.utils, "_use_triton", lambda device: True)
        compact, _, _ = trainer.prediction_step(model, batch, prediction_loss_only=True)
    assert logits.shape == expected[1].shape
    assert loss == expected[0]
    torch.testing.assert_close(alone, loss)
    torch.testing.assert_close(compact, loss)


class Doubled(torch.nn.Module):
    """A head that is more than one matmul."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * torch.nn.functional.linear(hidden, self.weight)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_gkd_leaves_a_head_that_is_not_linear_to_trl(side: str, tmp_path: Path) -> None:
    model, teacher = make(tie_word_embeddings=False).train(), make(tie_word_embeddings=False)
    changed = model if side == "student" else teacher
    changed.lm_head = Doubled(changed.lm_head)
    expected = history(gkd(twin(model), teacher, tmp_path, lmbda=0.0))
    with liger_hf.use_in_trl():
        assert history(gkd(model, teacher, tmp_path, lmbda=0.0)) == expected


ALL = {
    "student_logit_scale": 0.5, "teacher_logit_scale": -2.0, "student_final_logit_softcapping": 3.0,
    "teacher_final_logit_softcapping": 2.0, "temperature": 0.7,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {**ALL, "bias": True}], ids=["plain", "all options"])
@pytest.mark.parametrize("items", [None, torch.tensor(11.0)], ids=["local mean", "items of the batch"])
@pytest.mark.parametrize("mask", ["some", "none"])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_the_loss_of_trl_its_entropy_and_gradients_are_ours(
    beta: float, mask: str, items: Any, options: dict[str, Any]
) -> None:
    options, shapes = dict(options), [(2, 5, 16), (2, 5, 24), (50, 16), (50, 24), (50,), (50,)]
    tensors = [torch.randn(shape) for shape in shapes]
    student = [tensors[i].requires_grad_() for i in (0, 2, 4)]
    if options.pop("bias", False):
        options.update(student_lm_head_bias=tensors[4], teacher_lm_head_bias=tensors[5])
    else:
        student.pop()
    counted = torch.rand(2, 5) > 0.4 if mask == "some" else torch.zeros(2, 5)

    def call() -> tuple[Tensor, ...]:
        loss, entropy, count = trl.trainer.distillation_trainer._chunked_divergence_loss(
            *tensors[:4], counted, beta, num_items_in_batch=items, **options
        )
        return loss, entropy, count, *torch.autograd.grad(loss, student)

    expected = call()
    with liger_hf.use_in_trl():
        found = call()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def functions() -> list[Any]:
    from trl.experimental.gkd import GKDTrainer

    utils = trl.trainer.utils
    names = [utils._ChunkedLogProbFunction, trl.trainer.distillation_trainer._chunked_divergence_loss]
    return [*names, GKDTrainer.compute_loss]


def test_undo_brings_back_the_functions_of_trl() -> None:
    originals = functions()
    with liger_hf.use_in_trl() as ours:
        first = functions()
        with liger_hf.use_in_trl():
            assert not set(functions()) & {*originals, *first}
        assert functions() == first
    ours.undo()
    assert functions() == originals


@pytest.mark.parametrize("name", ["utils._ChunkedLogProbFunction", "distillation_trainer._chunked_divergence_loss"])
def test_another_version_of_trl_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"trl.trainer.{name}", lambda hidden: None)
    wanted = rf"^use_in_trl knows TRL 1\.16, got .*, in which trl\.trainer\.{name} is missing or takes other arguments$"
    with pytest.raises(Unsupported, match=wanted):
        liger_hf.use_in_trl()
