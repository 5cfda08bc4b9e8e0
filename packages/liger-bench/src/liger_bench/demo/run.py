# SPDX-License-Identifier: Apache-2.0
"""The demo: two training runs, their comparison, and the result as a dictionary."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

import liger_hf
from liger_bench import machine
from liger_bench.agreement import bound, largest_difference
from liger_bench.demo.measure import Stepper, loss_memory, speed_is_clear, tokens_per_second
from liger_bench.demo.model import build, parameters, twin
from liger_bench.demo.settings import Settings
from liger_bench.demo.train import train
from liger_bench.text import Sequences, Text, library_text
from liger_core import explain, linear_cross_entropy

# Called at the end of a step, with a description of it.
Advance = Callable[..., None]


def run(settings: Settings, bar: Progress) -> dict[str, Any]:
    """Train with and without Liger, measure both, and judge the difference of their losses."""
    low = settings.dtype != torch.float32
    rounds = _rounds(settings)
    total = settings.steps * (3 if low else 2) + 2 * (rounds + 1) + 3
    task = bar.add_task("reading the standard library", total=total, unit="step")

    def phase(description: str) -> Advance:
        bar.update(task, description=description)

        def advance(state: str = "") -> None:
            bar.update(task, advance=1, description=f"{description}: {state}" if state else description)

        return advance

    advance = phase("reading the standard library")
    text = library_text(settings.batch, settings.sequence)
    data = Sequences(text.sequences)
    advance()
    losses: dict[str, list[float]] = {}
    losses["plain"] = _train(settings, data, phase("training without Liger"))
    model = build(settings)
    report = str(liger_hf.apply(model))
    losses["liger"] = train(model, data, settings, phase("training with Liger"))
    del model
    _release()
    if low:
        # The same sums in another order, twice over: attention written out, and the batch in two halves.
        pieces = 2 if settings.batch % 2 == 0 else 1
        losses["noise"] = _train(
            settings, data, phase("training without Liger, sums reordered"), attention="eager", pieces=pieces
        )
    return {**_judged(losses), **_measured(settings, text, rounds, phase), **_described(settings, text, losses, report)}


def _train(
    settings: Settings, data: Sequences, advance: Advance, *, attention: str = "sdpa", pieces: int = 1
) -> list[float]:
    model = build(settings, attention=attention)
    try:
        return train(model, data, settings, advance, pieces=pieces)
    finally:
        del model
        _release()


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _rounds(settings: Settings) -> int:
    """Timed steps of each model: enough to choose from, and no more than were trained."""
    return min(settings.steps, 8 if settings.device.type == "cpu" else 20)


def _judged(losses: dict[str, list[float]]) -> dict[str, Any]:
    difference = largest_difference(losses["plain"], losses["liger"])
    noise = largest_difference(losses["plain"], losses["noise"]) if "noise" in losses else None
    allowed = bound(noise)
    return {
        "loss_hf": losses["plain"][-1],
        "loss_liger": losses["liger"][-1],
        "max_loss_difference": difference,
        "loss_noise": noise,
        "loss_difference_bound": allowed,
        "passed": difference <= allowed < math.inf,
    }


def _measured(settings: Settings, text: Text, rounds: int, phase: Callable[[str], Advance]) -> dict[str, Any]:
    plain = build(settings)
    liger = twin(plain, settings)
    liger_hf.apply(liger)
    batch = text.sequences[: settings.batch]
    stepper = Stepper({"plain": plain, "liger": liger}, batch, settings)
    seconds = stepper.speeds(rounds, phase("timing interleaved steps"))
    advance = phase("measuring memory")
    step = {name: stepper.peak(name) for name in stepper.models}
    advance()
    loss = loss_memory(plain, batch, settings)
    advance()
    speed = {name: tokens_per_second(batch.numel(), taken, settings.device) for name, taken in seconds.items()}
    return {
        "peak_memory_hf_bytes": step["plain"],
        "peak_memory_liger_bytes": step["liger"],
        "peak_loss_memory_hf_bytes": loss["plain"],
        "peak_loss_memory_liger_bytes": loss["liger"],
        "tokens_per_second_hf": speed["plain"],
        "tokens_per_second_liger": speed["liger"],
        "speed_is_clear": speed_is_clear(seconds.values()),
        "step_seconds_hf": seconds["plain"],
        "step_seconds_liger": seconds["liger"],
        "parameters": parameters(plain),
        "backend": _backend(plain, batch.to(settings.device)),
    }


def _backend(model: PreTrainedModel, batch: torch.Tensor) -> str:
    """The backend that the largest of the ops gets here."""
    weight = model.get_output_embeddings().weight
    hidden = weight.detach()[:1].expand(batch.shape[1], -1)
    return explain(linear_cross_entropy, hidden, weight, batch[0]).backend


def _described(settings: Settings, text: Text, losses: dict[str, list[float]], report: str) -> dict[str, Any]:
    return {
        "device": settings.device.type,
        "dtype": machine.dtype_name(settings.dtype),
        "model": settings.size,
        "steps": settings.steps,
        "batch": settings.batch,
        "sequence": settings.sequence,
        "gradient_checkpointing": settings.checkpointing,
        "text": {
            "tokens": text.tokens,
            "characters": text.characters,
            "files": text.files,
            "vocabulary": text.vocabulary,
        },
        "losses_hf": losses["plain"],
        "losses_liger": losses["liger"],
        "losses_reordered": losses.get("noise"),
        "report": report,
        **machine.describe(settings.device),
    }
