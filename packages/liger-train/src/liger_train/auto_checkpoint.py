# SPDX-License-Identifier: Apache-2.0
"""`--checkpoint auto`: decide by measurements during the run what each layer keeps, recomputes or offloads."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from liger_train import checkpointing
from liger_train.checkpointing import Keeps
from liger_train.configs import config_of
from liger_train.model import weights_dtype
from liger_train.setup import Setup

# The fraction of memory to keep free, for fragmentation and for sizes that vary between steps.
MARGIN = 0.06
# The minimum number of tokens in a part of a batch, to keep a GPU busy.
BUSY = 8192
# Inputs of layers are offloaded if they would take more than this share of the device memory: pinning host memory takes
# seconds.
WORTH_OFFLOADING = 1 / 8
# The ladders that layers move up: without offloading, with copies hidden by the computation, and with exposed copies,
# which make it worth keeping inputs on the device.
RECOMPUTES = (Keeps.INPUT, Keeps.MATMULS, Keeps.ALL)
HIDDEN = (Keeps.NOTHING, Keeps.MATMULS, Keeps.ALL)
EXPOSED = (Keeps.NOTHING, *RECOMPUTES)


@dataclass(frozen=True)
class StepMemory:
    """Measurements of one step, in bytes.

    peak           peak memory since the run started
    at_last_layer  allocated at the start of the forward pass of the last layer
    last_layer     saved by that pass for the backward pass
    retried        whether the allocator had to free cached blocks to serve a request
    """

    peak: int
    at_last_layer: int
    last_layer: int
    retried: bool = False


class KeepPolicy:
    """Decides after each step how many layers move up a ladder, by default from Keeps.INPUT to MATMULS to ALL.

    The last layer moves first, because its memory is freed before earlier layers are recomputed. A move raises the peak
    by at most the extra memory that the layer keeps, so as many layers move as fit between the peak and the limit. Most
    raise the peak by less, so this repeats until none fits. The cost of the first move of each kind is unknown; it
    needs room for all that recomputing the last layer took: the peak of the first step minus the memory before that
    layer.

    If not all layers can keep their matmul outputs, the batch is split, where allowed, into parts that run one after
    the other. Each part keeps less, and all parts together compute no more than the whole batch.

    alike    whether all layers have the same size
    splits   the maximum number of parts of a batch
    ladder   what a layer may keep, in ascending order
    parts    the current number of parts
    moves    the number of moves so far, at most layers × (rungs of the ladder − 1)
    settled  whether all moves are done
    """

    def __init__(
        self, layers: int, limit: int, alike: bool = True, splits: int = 1, ladder: tuple[Keeps, ...] = RECOMPUTES
    ) -> None:
        self.layers, self.alike, self.splits, self.ladder = layers, alike, splits, ladder
        self.limit = int(limit * (1 - MARGIN))
        self.moves, self.parts = 0, 1
        self.settled = layers == 0
        self._reserve: int | None = None
        self._saved: list[int] = []
        self._retried = False

    def after(self, step: StepMemory) -> int:
        """Update and return the number of moves, by the measurements of a step."""
        if self._reserve is None:
            self._reserve = max(1, step.peak - step.at_last_layer)
            self._saved.append(step.last_layer)
        # Blocks of new sizes may cause one retry; a retry in every step costs more than recomputing a layer.
        retried_twice, self._retried = step.retried and self._retried, step.retried
        # The peak exceeds the limit only if layers differ, or if a batch has more tokens.
        if retried_twice or (step.peak > self.limit and not self.settled):
            self.moves, self.settled, self._retried = max(0, self.moves - 1), True, False
        if self.settled:
            return self.moves
        parts, more = self.parts, self._more(step)
        self.moves += more
        self.settled = more == 0 and self.parts == parts
        return self.moves

    def keeps(self, layer: int) -> Keeps:
        """Return what a layer keeps; layer 0 is the first."""
        from_end = self.layers - 1 - layer
        return self.ladder[sum(self.moves > kind * self.layers + from_end for kind in range(len(self.ladder) - 1))]

    def _more(self, step: StepMemory) -> int:
        """Return how many more layers move, or split the batch."""
        kind, done = divmod(self.moves, self.layers)
        if kind == len(self.ladder) - 1:
            return 0
        room = self.limit - step.peak
        reserve = self._reserve or 0
        if done == 0:
            # Only the last layer moves, which measures the cost of a move of this kind.
            return int(room >= reserve)
        self._saved[kind + 1 :] = [step.last_layer]
        each = max(1, self._saved[kind + 1] - self._saved[kind])
        if self.ladder[kind] is Keeps.NOTHING:
            # The layer also keeps its input, as large as its output, which is all that a recomputed layer saves.
            each += self._saved[0]
        if not self.alike:
            return int(room >= max(each, reserve))
        if (
            self.ladder[kind + 1] is Keeps.MATMULS
            and (self.layers - done) * each > room
            and self._split((self.layers - done) * each, room)
        ):
            # The next step measures a layer with smaller parts, and the peak with the gradients of earlier parts.
            return 0
        return min(self.layers - done, room // each)

    def _split(self, needed: int, room: int) -> bool:
        """Split the batch into as many parts as needed or allowed; return whether it was split."""
        parts = min(self.splits, self.parts * -(-needed // max(1, room)))
        # The gradients of a part stay allocated during the next one, besides the inputs of all layers and one
        # recomputed layer.
        if parts == self.parts or room < self.layers * self._saved[0] * self.parts // parts + (self._reserve or 0):
            return False
        self._saved = [size * self.parts // parts for size in self._saved]
        self._reserve = -(-(self._reserve or 0) * self.parts // parts)
        self.parts = parts
        return True


class GPU:
    """Measurements of the GPU. The counters of PyTorch's allocator need no synchronization."""

    def __init__(self, memory_limit: int | None) -> None:
        self.memory_limit = memory_limit

    def limit(self) -> int:
        # Other processes may use the device, too.
        free, _ = torch.cuda.mem_get_info()
        has = free + torch.cuda.memory_reserved()
        return has if self.memory_limit is None else min(has, self.memory_limit)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    def tidy(self) -> None:
        """Free cached blocks, before blocks of other sizes are needed."""
        torch.cuda.empty_cache()

    def mark(self) -> Any:
        """Record an event in the current stream, and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def copies(self, size: int) -> float:
        """Estimate the seconds for copying `size` bytes to pinned host memory by timing a smaller copy."""
        sample = min(size, 1 << 26)
        source = torch.empty(sample, dtype=torch.uint8, device="cuda")
        target = torch.empty(sample, dtype=torch.uint8, pin_memory=True)
        target.copy_(source, non_blocking=True)
        start = self.mark()
        target.copy_(source, non_blocking=True)
        return self.seconds(start, self.mark()) * size / sample


class AutoCheckpoint(TrainerCallback):
    """Sets what the layers of a Trainer's model keep, by a KeepPolicy, and notes the result.

    All ranks follow the rank with the least free memory, because sharded layers must recompute on all ranks or on none.

    splits  the maximum number of parts of a batch
    inputs  bytes of the inputs of all layers if they may be offloaded, else 0
    """

    def __init__(self, memory: GPU, note: Callable[[str], object], splits: int = 1, inputs: int = 0) -> None:
        self.memory, self.note, self.splits, self.inputs = memory, note, splits, inputs
        self._offloading = checkpointing.Offloading()
        self._marks: tuple[Any, Any] | None = None
        self.policy: KeepPolicy | None = None
        self._selective = checkpointing.SelectiveCheckpointing()
        self._layers: list[Any] = []
        self._hooks: list[Any] = []
        self._entered: int | None = None
        self._last: tuple[int, int] | None = None
        self._has_state = False
        self._retries = 0

    @property
    def parts(self) -> int:
        """The number of parts into which the Trainer splits each batch."""
        return self.policy.parts if self.policy else 1

    @property
    def settled(self) -> bool:
        return self.policy is not None and self.policy.settled

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self._layers = checkpointing.layers(model)
        if self._layers:
            last = self._layers[-1]
            self._hooks = [
                last.register_forward_pre_hook(self._before_last_layer),
                last.register_forward_hook(self._after_last_layer),
            ]
            if self.inputs and _least(int(self.inputs > self.memory.limit() * WORTH_OFFLOADING), args.device):
                for layer in self._layers:
                    checkpointing.keep(layer, Keeps.NOTHING, offloading=self._offloading)
            else:
                self.inputs = 0

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._hooks:
            self._entered = self._last = None

    def on_step_end(self, args: Any, state: TrainerState, control: Any, optimizer: Any = None, **more: Any) -> None:
        # Only steps that begin with optimizer state count; the first allocates it, unless the scaled loss overflowed.
        had_state, self._has_state = self._has_state, _has_state(optimizer)
        if self._last is None or not (had_state and self._has_state):
            return
        if self.policy is None:
            alike = len({_weights(layer) for layer in self._layers}) == 1
            limit = _least(self.memory.limit(), args.device)
            self.policy = KeepPolicy(len(self._layers), limit, alike, self.splits, self._ladder(args.device))
            self._retries = self.memory.retries()
        if self.policy.settled and _ranks() > 1:
            # Measuring on, over all ranks, would synchronize every step.
            return
        retries, self._retries = self._retries, self.memory.retries()
        measured = [_most(value, args.device) for value in (self.memory.peak(), *self._last, self._retries - retries)]
        keeps = [self.policy.keeps(index) for index in range(len(self._layers))]
        moves, parts = self.policy.moves, self.parts
        self.policy.after(StepMemory(measured[0], measured[1], measured[2], retried=measured[3] > 0))
        if self.parts != parts:
            self.memory.tidy()
        for index, layer in enumerate(self._layers):
            if self.policy.keeps(index) is not keeps[index]:
                checkpointing.keep(layer, self.policy.keeps(index), self._selective, self._offloading)
        if self.policy.settled and (self._hooks or moves != self.policy.moves):
            self._end(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._hooks:
            self._end(state.global_step)

    def _ladder(self, device: torch.device) -> tuple[Keeps, ...]:
        """Return the ladder, by whether copying an input takes longer than the forward pass of a layer."""
        if not self.inputs or self._marks is None:
            return RECOMPUTES
        exposed = self.memory.copies(self.inputs // len(self._layers)) > self.memory.seconds(*self._marks)
        return EXPOSED if _most(int(exposed), device) else HIDDEN

    def _before_last_layer(self, module: nn.Module, inputs: Any) -> None:
        # Later calls in the step recompute, or belong to another micro-batch.
        if self._entered is None:
            self._entered = self.memory.allocated()
            self._begun = self.memory.mark()

    def _after_last_layer(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._last is None and self._entered is not None:
            self._last = (self._entered, self.memory.allocated() - self._entered)
            self._marks = (self._begun, self.memory.mark())

    def _end(self, step: int) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.note(f"--checkpoint auto: from step {step + 1} on, {_summary(self._layers, self.policy)}.")


def observers(setup: Setup, note: Callable[[str], object]) -> Sequence[AutoCheckpoint]:
    """Return the callbacks of the Trainer for a setup's activation checkpointing; `note` gets sentences."""
    if setup.checkpoint != "auto":
        return []
    return [AutoCheckpoint(GPU(setup.memory_limit), note, splits(setup), inputs_to_offload(setup))]


def inputs_to_offload(setup: Setup) -> int:
    """Return the bytes of the inputs of all layers, or 0 if the host has less than twice that memory for each rank."""
    size = bytes_of_inputs(setup)
    return size if 2 * size * setup.ranks <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") else 0


def bytes_of_inputs(setup: Setup) -> int:
    """Return the bytes of the inputs of all layers on a rank."""
    text = config_of(setup).get_text_config()
    # With mixed precision, hidden states have the dtype of the weights.
    inputs = setup.batch * setup.sequence // setup.cp * text.num_hidden_layers
    return int(inputs * text.hidden_size * weights_dtype(setup).itemsize)


def splits(setup: Setup) -> int:
    """Return the maximum number of parts of a batch.

    Each part must keep the GPU busy. A batch is not split if a backward pass does more than accumulate gradients.
    """
    if setup.ranks > 1 or setup.shard != "none" or setup.optimizer == "galore-layerwise":
        return 1
    return max(1, min(setup.batch, setup.batch * setup.sequence // BUSY))


def _summary(layers: list[Any], policy: KeepPolicy | None) -> str:
    keeps = [policy.keeps(index) if policy else Keeps.INPUT for index in range(len(layers))]
    batch = f"each batch is split into {policy.parts} parts; " if policy and policy.parts > 1 else ""
    offloaded = keeps.count(Keeps.NOTHING)
    inputs = f"layers with offloaded inputs: {offloaded}; " if offloaded else ""
    full, selective, none = offloaded + keeps.count(Keeps.INPUT), keeps.count(Keeps.MATMULS), keeps.count(Keeps.ALL)
    recompute = f"layers with full recompute: {full}, with selective recompute: {selective}, without recompute: {none}"
    return batch + inputs + recompute


def _has_state(optimizer: Any) -> bool:
    """Return whether the optimizer state is allocated.

    DeepSpeed allocates it before the first step, and has no `state`. A layerwise optimizer has a state per weight.
    """
    if hasattr(getattr(optimizer, "optimizer", None), "optimizer_dict"):
        return True
    try:
        return len(optimizer.state) > 0
    except (AttributeError, TypeError, NotImplementedError):
        return True


def _weights(layer: nn.Module) -> int:
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in layer.parameters())


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _most(value: int, device: torch.device) -> int:
    """Return the maximum over all ranks."""
    if _ranks() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def _least(value: int, device: torch.device) -> int:
    return -_most(-value, device)
