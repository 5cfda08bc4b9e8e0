# SPDX-License-Identifier: Apache-2.0
"""The memory of a run on the CPU, measured in one step, because the CPU allocator keeps no statistics."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState

from liger_bench.memory import CpuAllocations, held_bytes, peak_of
from liger_train.row import WARM_UP


class CpuMemory(TrainerCallback, AbstractContextManager["CpuMemory"]):
    """Measures peak and static bytes of the last warm-up step, when the optimizer has its state; None until then.

    The peak is the memory at the start of the step, plus the peak of what the step allocates. DeepSpeed's buffers do
    not count.

    buckets  whether all gradients have buckets, also between steps
    """

    def __init__(self, buckets: bool = False) -> None:
        self.buckets = buckets
        self.peak: int | None = None
        self.static: int | None = None
        self._step = 0
        self._bytes_before = 0
        self._allocations: CpuAllocations | None = None
        self._recording = ExitStack()

    def __exit__(self, *_: object) -> None:
        """Stop the profiler if the measured step failed; it would record until the process ends."""
        self._recording.close()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        self._step = min(state.global_step + WARM_UP, state.max_steps)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if state.global_step + 1 == self._step:
            self._bytes_before = self._allocated_bytes(more["model"], more["optimizer"])
            self._allocations = self._recording.enter_context(CpuAllocations())

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._allocations is not None:
            self._recording.close()
            self.peak = self._bytes_before + peak_of(self._allocations.events())
            self.static = self._allocated_bytes(more["model"], more["optimizer"])
            self._allocations = None

    def _allocated_bytes(self, model: nn.Module, optimizer: Any) -> int:
        """Return the bytes of weights, gradients or their buckets, and optimizer state."""
        weights = [*model.parameters(), *model.buffers()]
        inner = getattr(optimizer, "optimizer", optimizer)
        # Layerwise GaLore has an optimizer per weight.
        optimizers = getattr(inner, "optimizer_dict", {})
        state = [each.state for each in optimizers.values()] if optimizers else [getattr(optimizer, "state", {})]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        buckets = sum(weight.nbytes for weight in weights if weight.requires_grad) if self.buckets else 0
        return buckets + held_bytes([*weights, *([] if self.buckets else gradients), *(dict(each) for each in state)])
