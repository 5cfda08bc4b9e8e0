# SPDX-License-Identifier: Apache-2.0
"""The memory of a run on the CPU, measured in one step, since the CPU allocator keeps no statistics."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState

from liger_bench.memory import CpuAllocations, held_bytes, peak_of
from liger_train.row import WARM_UP


class CpuMemory(TrainerCallback):
    """Peak and static bytes of the last warm-up step, in which the optimizer has its state; None until then.

    The peak is the memory at the start of the step plus the most that the step allocates. DeepSpeed's buffers are not
    included.
    """

    def __init__(self) -> None:
        self.peak: int | None = None
        self.static: int | None = None
        self._step = 0
        self._before = 0
        self._allocations: CpuAllocations | None = None
        self._recording = ExitStack()

    def __enter__(self) -> CpuMemory:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the profiler where the watched step failed: it would keep recording for as long as the process lives."""
        self._recording.close()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        self._step = min(state.global_step + WARM_UP, state.max_steps)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if state.global_step + 1 == self._step:
            self._before = _held(more["model"], more["optimizer"])
            self._allocations = self._recording.enter_context(CpuAllocations())

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._allocations is not None:
            self._recording.close()
            self.peak = self._before + peak_of(self._allocations.events())
            self.static = _held(more["model"], more["optimizer"])
            self._allocations = None


def _held(model: nn.Module, optimizer: Any) -> int:
    """Bytes of weights, gradients and optimizer state."""
    weights = [*model.parameters(), *model.buffers()]
    inner = getattr(optimizer, "optimizer", optimizer)
    # Layerwise GaLore has an optimizer per weight.
    several = getattr(inner, "optimizer_dict", {})
    state = [each.state for each in several.values()] if several else [getattr(optimizer, "state", {})]
    return held_bytes(
        [*weights, *(weight.grad for weight in weights if weight.grad is not None), *(dict(each) for each in state)]
    )
