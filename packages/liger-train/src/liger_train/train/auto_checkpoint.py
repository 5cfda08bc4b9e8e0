# SPDX-License-Identifier: Apache-2.0
"""`--checkpoint auto`: decide during the run, from its measurements, what each layer keeps, recomputes or offloads."""

from __future__ import annotations

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
from liger_train.row import AUTO_NOTE
from liger_train.setup import Setup

# The fraction of memory to keep free, for fragmentation and for sizes that vary between steps.
MARGIN = 0.06
# Tokens that keep a GPU busy; parts of a batch have at least so many.
BUSY = 8192
# Inputs of layers are offloaded where all of them would take more than this share of the device: pinning host memory
# takes seconds.
WORTH_OFFLOADING = 1 / 8
# What layers keep, from move to move. With offloaded inputs the first move is none where their copies hide behind the
# computation.
RECOMPUTES = (Keeps.INPUT, Keeps.MATMULS, Keeps.ALL)
HIDDEN = (Keeps.NOTHING, Keeps.MATMULS, Keeps.ALL)
EXPOSED = (Keeps.NOTHING, *RECOMPUTES)


@dataclass(frozen=True)
class Seen:
    """Measurements of one step, in bytes.

    peak     peak memory since the run started
    before   allocated at the start of the forward pass of the last layer
    held     what that pass kept for the backward pass
    retried  whether the allocator had to free cached blocks to serve a request
    """

    peak: int
    before: int
    held: int
    retried: bool = False


class Spending:
    """Decides after each step how many layers to move up a ladder, by default from Keeps.INPUT to MATMULS to ALL.

    The last layer moves first: what it keeps is freed before earlier layers are recomputed. Moving a layer raises the
    peak by at most the extra memory that it keeps. So as many layers move as fit between the peak and the limit; since
    most raise it by less, this is repeated until none fits. The first move of each kind, whose cost is unknown, needs
    room for everything that recomputing the last layer took: the peak of the first step minus the memory before that
    layer.

    If not all layers can keep their matmul outputs, the batch is split into parts that run one after the other, where
    that is allowed: each part keeps less, and all parts together compute no more than the whole batch.

    splits   the most parts of a batch
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
        self._unknown: int | None = None
        self._held: list[int] = []
        self._retried = False

    def after(self, seen: Seen) -> int:
        """Return the number of moves for the next step, given the measurements of a step with `moves`."""
        if self._unknown is None:
            self._unknown = max(1, seen.peak - seen.before)
            self._held.append(seen.held)
        # One retry may be due to blocks of new sizes; a retry in every step costs more than recomputing a layer.
        again, self._retried = seen.retried and self._retried, seen.retried
        # The peak exceeds the limit only if layers differ or a batch has more tokens.
        if again or (seen.peak > self.limit and not self.settled):
            self.moves, self.settled, self._retried = max(0, self.moves - 1), True, False
        if self.settled:
            return self.moves
        parts, more = self.parts, self._more(seen)
        self.moves += more
        self.settled = more == 0 and self.parts == parts
        return self.moves

    def keeps(self, layer: int) -> Keeps:
        """Return what a layer keeps; layer 0 is the first."""
        from_end = self.layers - 1 - layer
        return self.ladder[sum(self.moves > kind * self.layers + from_end for kind in range(len(self.ladder) - 1))]

    def _more(self, seen: Seen) -> int:
        kind, done = divmod(self.moves, self.layers)
        if kind == len(self.ladder) - 1:
            return 0
        room = self.limit - seen.peak
        unknown = self._unknown or 0
        if done == 0:
            # The first move of a kind, of the last layer, measures its cost.
            return int(room >= unknown)
        self._held[kind + 1 :] = [seen.held]
        each = max(1, self._held[kind + 1] - self._held[kind])
        if self.ladder[kind] is Keeps.NOTHING:
            # The layer keeps its input as well, which has the size of its output. A layer that recomputes holds nothing
            # else.
            each += self._held[0]
        if not self.alike:
            return int(room >= max(each, unknown))
        if (
            self.ladder[kind + 1] is Keeps.MATMULS
            and (self.layers - done) * each > room
            and self._in_parts((self.layers - done) * each, room)
        ):
            # The next step measures the cost of a layer with smaller parts, and the peak with the gradients of earlier
            # parts.
            return 0
        return min(self.layers - done, room // each)

    def _in_parts(self, needed: int, room: int) -> bool:
        """Split the batch into as many parts as the layers need, or as are allowed; return whether it was split."""
        parts = min(self.splits, self.parts * -(-needed // max(1, room)))
        # The gradients of one part stay throughout the next one; the inputs of all layers and one recomputed layer come
        # on top.
        if parts == self.parts or room < self.layers * self._held[0] * self.parts // parts + (self._unknown or 0):
            return False
        self._held = [held * self.parts // parts for held in self._held]
        self._unknown = -(-(self._unknown or 0) * self.parts // parts)
        self.parts = parts
        return True


class GPU:
    """Counters of PyTorch's allocator, which need no synchronization."""

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
        """Free cached blocks before blocks of other sizes are needed."""
        torch.cuda.empty_cache()

    def mark(self) -> torch.cuda.Event:
        """Record and return an event in the stream of the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events."""
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def copies(self, size: int) -> float:
        """Estimate the seconds that copying `size` bytes to pinned host memory takes, by measuring a smaller copy."""
        sample = min(size, 1 << 26)
        here = torch.empty(sample, dtype=torch.uint8, device="cuda")
        there = torch.empty(sample, dtype=torch.uint8, pin_memory=True)
        there.copy_(here, non_blocking=True)
        start = self.mark()
        there.copy_(here, non_blocking=True)
        return self.seconds(start, self.mark()) * size / sample


class SpendMemory(TrainerCallback):
    """Moves the layers of a Trainer's model as Spending decides, and notes the result.

    All ranks make the same decision, by the rank with the least memory left: sharded layers must recompute on all ranks
    or on none.

    splits  the most parts of a batch
    inputs  bytes of the inputs of all layers, if they may be offloaded; otherwise nothing
    """

    def __init__(self, memory: GPU, note: Callable[[str], object], splits: int = 1, inputs: int = 0) -> None:
        self.memory, self.note, self.splits, self.inputs = memory, note, splits, inputs
        self._offloading = checkpointing.Offloading()
        self._marks: tuple[Any, Any] | None = None
        self.spending: Spending | None = None
        self._matmuls = checkpointing.Matmuls()
        self._layers: list[Any] = []
        self._hooks: list[Any] = []
        self._entered: int | None = None
        self._last: tuple[int, int] | None = None
        self._has_state = False
        self._retries = 0

    @property
    def parts(self) -> int:
        """The number of parts into which the Trainer splits each batch."""
        return self.spending.parts if self.spending else 1

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self._layers = checkpointing.layers(model)
        if self._layers:
            last = self._layers[-1]
            self._hooks = [last.register_forward_pre_hook(self._begins), last.register_forward_hook(self._ends)]
            if self.inputs and _least(int(self.inputs > self.memory.limit() * WORTH_OFFLOADING), args.device):
                for layer in self._layers:
                    checkpointing.keep(layer, Keeps.NOTHING, offloading=self._offloading)
            else:
                self.inputs = 0

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._hooks:
            self._entered = self._last = None

    def on_step_end(self, args: Any, state: TrainerState, control: Any, optimizer: Any = None, **more: Any) -> None:
        # The first step allocates the optimizer state, unless the scaled loss overflowed; only later steps include it.
        had_state, self._has_state = self._has_state, _has_state(optimizer)
        if self._last is None or not (had_state and self._has_state):
            return
        if self.spending is None:
            alike = len({_weights(layer) for layer in self._layers}) == 1
            limit = _least(self.memory.limit(), args.device)
            self.spending = Spending(len(self._layers), limit, alike, self.splits, self._ladder(args.device))
            self._retries = self.memory.retries()
        if self.spending.settled and _ranks() > 1:
            # Asking the other ranks would synchronize every step.
            return
        retries, self._retries = self._retries, self.memory.retries()
        seen = [_most(value, args.device) for value in (self.memory.peak(), *self._last, self._retries - retries)]
        keeps = [self.spending.keeps(index) for index in range(len(self._layers))]
        moves, parts = self.spending.moves, self.parts
        self.spending.after(Seen(seen[0], seen[1], seen[2], retried=seen[3] > 0))
        if self.parts != parts:
            self.memory.tidy()
        for index, layer in enumerate(self._layers):
            if self.spending.keeps(index) is not keeps[index]:
                checkpointing.keep(layer, self.spending.keeps(index), self._matmuls, self._offloading)
        if self.spending.settled and (self._hooks or moves != self.spending.moves):
            self._end(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        if self._hooks:
            self._end(state.global_step)

    def _ladder(self, device: torch.device) -> tuple[Keeps, ...]:
        """Return the ladder, without Keeps.INPUT if copying an input is faster than the forward pass of a layer."""
        if not self.inputs or self._marks is None:
            return RECOMPUTES
        exposed = self.memory.copies(self.inputs // len(self._layers)) > self.memory.seconds(*self._marks)
        return EXPOSED if _most(int(exposed), device) else HIDDEN

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        # Later calls in a step are recomputation or another micro-batch.
        if self._entered is None:
            self._entered = self.memory.allocated()
            self._begun = self.memory.mark()

    def _ends(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._last is None and self._entered is not None:
            self._last = (self._entered, self.memory.allocated() - self._entered)
            self._marks = (self._begun, self.memory.mark())

    def _end(self, step: int) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.note(f"--checkpoint auto: from step {step + 1} on, {_summary(self._layers, self.spending)}.")


def observers(setup: Setup, note: Callable[[str], object]) -> Sequence[SpendMemory]:
    """The callbacks that a setup's checkpointing needs in the Trainer; `note` gets sentences."""
    if setup.checkpoint != "auto":
        return []
    return [SpendMemory(GPU(setup.memory_limit), note, splits(setup), inputs_to_offload(setup))]


def inputs_to_offload(setup: Setup) -> int:
    """The bytes of the inputs of all layers, or nothing if the host has not twice as much memory for every rank."""
    text = config_of(setup).get_text_config()
    # Mixed precision keeps them in float32 where the weights are.
    inputs = setup.batch * setup.sequence // setup.cp * text.num_hidden_layers
    size = inputs * text.hidden_size * weights_dtype(setup).itemsize
    return size if 2 * size * setup.ranks <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") else 0


def splits(setup: Setup) -> int:
    """The most parts of a batch: each must keep the GPU busy, and a backward pass must only accumulate gradients."""
    if setup.ranks > 1 or setup.shard != "none" or setup.optimizer == "galore-layerwise":
        return 1
    return max(1, min(setup.batch, setup.batch * setup.sequence // BUSY))


def _summary(layers: list[Any], spending: Spending | None) -> str:
    keeps = [spending.keeps(index) if spending else Keeps.INPUT for index in range(len(layers))]
    batch = f"each batch is split into {spending.parts} parts; " if spending and spending.parts > 1 else ""
    offloaded = keeps.count(Keeps.NOTHING)
    inputs = f"layers with offloaded inputs: {offloaded}; " if offloaded else ""
    counts = (offloaded + keeps.count(Keeps.INPUT), keeps.count(Keeps.MATMULS), keeps.count(Keeps.ALL))
    return batch + inputs + AUTO_NOTE.format(*counts)


def _has_state(optimizer: Any) -> bool:
    """Whether the optimizer state is allocated.

    DeepSpeed allocates it before the first step and has no `state`; a layerwise optimizer has a state per weight.
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
    """Return the highest value of all ranks."""
    if _ranks() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def _least(value: int, device: torch.device) -> int:
    return -_most(-value, device)
