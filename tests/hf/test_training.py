# SPDX-License-Identifier: Apache-2.0
"""Training as people do it: the Trainer, accelerate, gradient checkpointing, mixed precision."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import liger_hf
from hf import tiny_models
from hf.tiny_models import (
    VOCABULARY,
    checkpoint_layers,
    disagreements,
    exact_step,
    gradients_of,
    losses_of,
    make,
    no_logits,
    pair,
    pair_of,
    step,
    tokens,
    twin,
)

pytestmark = pytest.mark.slow


def on_cpu() -> bool:
    return tiny_models.DEVICE.type == "cpu"


def arguments_for(folder: Path, **options: Any) -> TrainingArguments:
    arguments = TrainingArguments(
        str(folder), report_to=[], save_strategy="no", use_cpu=on_cpu(), disable_tqdm=True, **options
    )
    if arguments.n_gpu > 1:
        # The Trainer would split the batch over all GPUs.
        arguments._n_gpu = 1
    return arguments


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences with different numbers of counted labels."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, VOCABULARY, (count, 12), generator=generator)
        self.labels = self.ids.clone()
        for row in range(count):
            self.labels[row, : row % 7] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def history(
    model: Any, folder: Path, compute_metrics: Any = None, compute_loss_func: Any = None, **options: Any
) -> tuple[list[float], dict[str, float]]:
    """The logged losses of four steps, and the metrics of an evaluation."""
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    arguments = arguments_for(folder, **sizes, max_steps=4, logging_steps=1, learning_rate=1e-2, **options)
    data = {"train_dataset": Rows(16), "eval_dataset": Rows(6), "compute_loss_func": compute_loss_func}
    trainer = Trainer(model, arguments, compute_metrics=compute_metrics, **data)
    trainer.train()
    losses, metrics = losses_of(trainer), trainer.evaluate()
    return losses, {name: value for name, value in metrics.items() if name in ("eval_loss", "eval_accuracy")}


def accuracy(prediction: Any) -> dict[str, float]:
    classes, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((classes == labels)[labels != -100].mean())}


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    assert type(outputs["logits"]) is torch.Tensor
    total = nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (num_items_in_batch or 1)


TRAINERS: dict[str, dict[str, Any]] = {
    "accumulation_and_checkpointing": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "metrics": {"compute_metrics": accuracy},
    "metrics_in_pieces": {"compute_metrics": accuracy, "eval_accumulation_steps": 1},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "loss_of_the_user": {"compute_loss_func": own_loss, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("options", TRAINERS.values(), ids=TRAINERS.keys())
def test_the_trainer_logs_the_losses_and_metrics_of_the_unpatched_model(
    options: dict[str, Any], tmp_path: Path
) -> None:
    patched, plain = pair()
    (losses, metrics), (expected, expected_metrics) = (
        history(model, tmp_path, **options) for model in (patched, plain)
    )
    assert len(losses) == 4
    assert losses == pytest.approx(expected, abs=2e-4)
    assert metrics == pytest.approx(expected_metrics, abs=2e-4)


@pytest.mark.parametrize("items", [None, 40], ids=["mean", "items_of_the_batch"])
def test_packed_sequences_have_the_loss_and_gradients_of_the_unpatched_model(
    items: int | None, place: torch.device
) -> None:
    patched, plain = pair()
    rows = [{"input_ids": Rows(3).ids[row, : 12 - row].tolist()} for row in range(3)]
    collated = DataCollatorWithFlattening(return_position_ids=True, return_tensors="pt")(rows)
    packed = {name: value.to(place) if isinstance(value, torch.Tensor) else value for name, value in collated.items()}
    assert packed["input_ids"].shape == (1, 33)
    inputs = {**packed, "use_cache": False} | ({} if items is None else {"num_items_in_batch": torch.tensor(items)})
    results = step(patched, **inputs)
    assert disagreements(results, step(plain, **inputs), exact_step(plain, **inputs)) == {}
    single = [torch.tensor([r["input_ids"]], device=place) for r in rows]
    alone = [float(step(plain, input_ids=ids, labels=ids)["loss"]) for ids in single]
    mean = sum(loss * (len(r["input_ids"]) - 1) for loss, r in zip(alone, rows, strict=True)) / 30
    assert float(results["loss"]) == pytest.approx(mean if items is None else mean * 30 / items, rel=1e-5)


def test_logits_of_an_evaluation_are_padded_and_gathered(fresh_accelerator: None) -> None:
    accelerator, gathered = Accelerator(cpu=on_cpu()), []
    patched, plain = pair_of(make().eval())
    for model in (patched, plain):
        prepared = accelerator.prepare(model)
        with torch.no_grad():
            outputs = prepared(**tokens())
        gathered.append(accelerator.gather_for_metrics(accelerator.pad_across_processes(outputs.logits, dim=1)))
    torch.testing.assert_close(*gathered)


def test_scaled_training_under_autocast_has_the_losses_of_float32(device: torch.device) -> None:
    def train(model: Any, enabled: bool) -> list[float]:
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=enabled)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
        for turn in range(4):
            inputs = {name: value.roll(turn, 0).to(device) for name, value in tokens(batch=4, length=24).items()}
            with torch.autocast(device.type, dtype=torch.float16, enabled=enabled):
                loss = model(**inputs).loss
            assert loss.dtype == torch.float32
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
        assert not enabled or scaler.get_scale() == 2.0**10
        return losses

    patched, plain = pair_of(make().train().to(device))
    expected = train(plain, False)
    assert expected[-1] < 0.9 * expected[0]
    assert train(patched, True) == pytest.approx(expected, rel=2e-3)


def test_training_with_the_trainer_makes_no_tensor_of_all_the_logits(tmp_path: Path) -> None:
    model, _ = pair(tie_word_embeddings=False)
    with no_logits():
        Trainer(model, arguments_for(tmp_path, max_steps=2), train_dataset=Rows(4)).train()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_gradient_checkpointing_of_layers_gives_the_same_gradients(architecture: str, reentrant: bool) -> None:
    patched, plain = pair(architecture)
    inputs = tokens()
    expected, exact = step(plain, **inputs), exact_step(plain, **inputs)
    checkpoint_layers(patched, reentrant)
    if reentrant:
        patched.enable_input_require_grads()
    assert disagreements(step(patched, **inputs), expected, exact) == {}


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_checkpointing_of_the_whole_model_gives_the_same_gradients(reentrant: bool) -> None:
    patched, plain = pair()
    inputs = tokens()

    def whole(model: Any) -> dict[str, torch.Tensor]:
        def loss(embedded: torch.Tensor) -> torch.Tensor:
            return model(inputs_embeds=embedded, labels=inputs["labels"]).loss

        model.zero_grad()
        value = checkpoint(loss, model.get_input_embeddings()(inputs["input_ids"]), use_reentrant=reentrant)
        value.backward()
        return {"loss": value.detach(), **gradients_of(model)}

    assert disagreements(whole(patched), whole(plain), whole(twin(plain).double())) == {}


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps the precision of a process in a class; it is forgotten before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("width", ["float32", "bfloat16"])
def test_accelerate_with_mixed_precision_keeps_the_logits_lazy(width: str, fresh_accelerator: None) -> None:
    accelerator = Accelerator(cpu=on_cpu(), mixed_precision="bf16" if width == "bfloat16" else "no")
    model = make().train()
    liger_hf.apply(model)
    prepared = accelerator.prepare(model)
    outputs = prepared(**tokens())
    assert isinstance(outputs.logits, liger_hf.LazyLogits)
    assert outputs.logits.dtype == torch.float32
    accelerator.backward(outputs.loss)
    assert all(parameter.grad is not None for parameter in model.parameters())
