# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of a training step with and without Liger, on separate steps.

The loss curves come from two complete runs, one after the other. Speed does not: whatever else the machine does
meanwhile, its temperature and the state of its caches would favor one of them. Here both models share one set of
parameters and one optimizer, each takes a warm-up step, and then their steps on the same batch are interleaved:
baseline, Liger, Liger, baseline. On a GPU the median counts. On a CPU, which other processes share, the fastest step of
each does: what they take can only slow a step down, and it slows one that synchronizes its threads often more than
another. Peak memory is measured on further steps, since recording allocations slows a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_bench.bench.timing import quantile
from liger_bench.demo.settings import Settings
from liger_bench.memory import held_bytes, peak_bytes
from liger_core import linear_cross_entropy

# How far the 0.8 quantile of the seconds of a step may be above the 0.2 quantile.
CLEAR = 1.25


class Stepper:
    """The training steps of several models that share their parameters."""

    def __init__(self, models: dict[str, PreTrainedModel], batch: Tensor, settings: Settings) -> None:
        self.models, self.batch, self.settings = models, batch.to(settings.device), settings
        first = next(iter(models.values()))
        self.parameters = list(first.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=settings.learning_rate, fused=True)

    def step(self, name: str) -> None:
        """Run one training step as the Trainer does, without its bookkeeping."""
        self.loss(name).backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, name: str) -> Tensor:
        # The other outputs end with this frame, as they do in the Trainer.
        loss: Tensor = self.models[name](input_ids=self.batch, labels=self.batch).loss
        return loss

    def seconds(self, name: str) -> float:
        self._wait()
        start = time.perf_counter()
        self.step(name)
        self._wait()
        return time.perf_counter() - start

    def speeds(self, rounds: int, advance: Callable[[str], object]) -> dict[str, list[float]]:
        """Return the seconds of each model's timed steps, after one warm-up step each."""
        taken: dict[str, list[float]] = {name: [] for name in self.models}
        order = list(self.models)
        for name in order:
            self.step(name)
            advance("warming up")
        for index in range(rounds):
            for name in order if index % 2 == 0 else reversed(order):
                taken[name].append(self.seconds(name))
                advance(f"{self.batch.numel() / taken[name][-1]:,.0f} tokens/s")
        return taken

    def peak(self, name: str) -> int:
        """Return the peak memory of one step in bytes, including parameters, optimizer state and batch."""
        state = (t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor))
        held = held_bytes([*self.parameters, *self.models[name].buffers(), *state, self.batch])
        return held + peak_bytes(lambda: self.step(name), self.settings.device)

    def _wait(self) -> None:
        if self.settings.device.type == "cuda":
            torch.cuda.synchronize(self.settings.device)


def tokens_per_second(tokens: int, seconds: list[float], device: torch.device) -> float:
    return tokens / (min(seconds) if device.type == "cpu" else statistics.median(seconds))


def speed_is_clear(seconds: Iterable[list[float]]) -> bool:
    """Whether each model's steps took about equally long. If not, other processes have distorted the ratio."""
    return all(quantile(taken, 0.8) <= CLEAR * quantile(taken, 0.2) for taken in seconds)


def loss_memory(model: PreTrainedModel, batch: Tensor, settings: Settings) -> dict[str, int]:
    """Return the peak bytes of LM head and loss alone, forward and backward, for given hidden states.

    Hidden states, head weight and labels are not counted; the gradients of the first two are.
    `plain` is the model's own LM head and loss function, `liger` the op on the weight of that head.
    """
    labels = batch.to(settings.device)
    with torch.no_grad():
        hidden = model.base_model(input_ids=labels).last_hidden_state
    hidden = hidden.detach().requires_grad_()
    head = model.get_output_embeddings()
    following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()

    def plain() -> None:
        _logits_loss(model, hidden, labels).backward()

    def liger() -> None:
        linear_cross_entropy(hidden, head.weight, following).backward()

    found: dict[str, int] = {}
    for name, function in (("plain", plain), ("liger", liger)):
        # The first call may set up what later ones reuse.
        function()
        hidden.grad = head.weight.grad = None
        found[name] = peak_bytes(function, settings.device)
        hidden.grad = head.weight.grad = None
    return found


def _logits_loss(model: PreTrainedModel, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = model.get_output_embeddings()(hidden)
    loss: Tensor = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)
    return loss
