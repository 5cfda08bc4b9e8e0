# SPDX-License-Identifier: Apache-2.0
"""`--checkpoint auto`: the memory that is left is spent on computing fewer layers again, while the training runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_bench import checkpointing
from liger_bench.checkpointing import Keeps
from liger_train.setup import Setup

# Of the memory; for the allocator's gaps, and for sizes that vary from step to step.
MARGIN = 0.06
# Tokens that keep a GPU busy. A batch is taken in parts of no fewer.
BUSY = 8192


@dataclass(frozen=True)
class Seen:
    """One step, in bytes.

    peak     the most that was held since the training began
    before   held when the forward pass of the last layer began
    held     what that pass left behind for the backward pass
    retried  whether the allocator had to give back what it had kept, to serve a request
    """

    peak: int
    before: int
    held: int
    retried: bool = False


class Spending:
    """Decides from the bytes of each step how many times a layer is moved up from Keeps.INPUT to PRODUCTS to ALL.

    The last layer is moved first: what it keeps is gone when the layers before it are computed again. A layer that is moved adds to
    the peak what it keeps more, at most, wherever the peak is. So as many are moved as fit between the peak and the limit; since most
    add less, that is repeated until none fits. The first one of its kind, whose bytes are unknown, is only moved if there is room for all
    that the last layer's recomputation took: the peak of the first step held that beyond what was there before that layer.

    Where not all layers can keep their products, the batch is taken in parts, one after the other, if it may be: a part keeps so much
    less, and all of them together compute no more than the whole batch would.

    splits   parts of the batch at most
    parts    of the batch
    moves    so many were made; layers × 2 at most
    settled  there will be no more of them
    """

    def __init__(self, layers: int, limit: int, alike: bool = True, splits: int = 1) -> None:
        self.layers, self.limit, self.alike, self.splits = layers, int(limit * (1 - MARGIN)), alike, splits
        self.moves, self.parts = 0, 1
        self.settled = layers == 0
        self._unknown: int | None = None
        self._held: list[int] = []
        self._retried = False

    def after(self, seen: Seen) -> int:
        """The moves that shall have been made before the next step; the step that was seen had `moves`."""
        if self._unknown is None:
            self._unknown = max(1, seen.peak - seen.before)
            self._held.append(seen.held)
        # Once, the allocator may have to make room for blocks of other sizes; in every step it would cost more than a layer does.
        again, self._retried = seen.retried and self._retried, seen.retried
        # The peak is too high only after a jump that was too large: layers that differ, or a batch with more tokens.
        if again or (seen.peak > self.limit and not self.settled):
            self.moves, self.settled, self._retried = max(0, self.moves - 1), True, False
        if self.settled:
            return self.moves
        parts, more = self.parts, self._more(seen)
        self.moves += more
        self.settled = more == 0 and self.parts == parts
        return self.moves

    def keeps(self, layer: int) -> Keeps:
        """What a layer keeps, 0 being the first one."""
        place = self.layers - 1 - layer
        return Keeps((self.moves > place) + (self.moves > self.layers + place))

    def _more(self, seen: Seen) -> int:
        kind, done = divmod(self.moves, self.layers)
        if kind == 2:
            return 0
        room = self.limit - seen.peak
        unknown = self._unknown or 0
        if done == 0:
            # The first of its kind, the last layer, shows what one takes.
            return int(room >= unknown)
        self._held[kind + 1 :] = [seen.held]
        each = max(1, self._held[kind + 1] - self._held[kind])
        if not self.alike:
            return int(room >= max(each, unknown))
        if kind == 0 and (self.layers - done) * each > room and self._in_parts((self.layers - done) * each, room):
            # The next step shows what a layer takes now, and the peak with the gradients of other parts beside it.
            return 0
        return min(self.layers - done, room // each)

    def _in_parts(self, needed: int, room: int) -> bool:
        """Take the batch in parts of which the layers can keep what they need, or in as many as there may be; whether that was done."""
        parts = min(self.splits, self.parts * -(-needed // max(1, room)))
        # Gradients of one part are there throughout the next one, as at the end of the whole batch: inputs and one layer come on top.
        if parts == self.parts or room < self.layers * self._held[0] * self.parts // parts + (self._unknown or 0):
            return False
        self._held = [held * self.parts // parts for held in self._held]
        self._unknown = -(-(self._unknown or 0) * self.parts // parts)
        self.parts = parts
        return True


class Memory(Protocol):
    """Of the device of this rank, in bytes; a GPU's, or a test's."""

    def limit(self) -> int: ...
    def allocated(self) -> int: ...
    def peak(self) -> int: ...
    def retries(self) -> int: ...
    def tidy(self) -> None: ...


class GPU:
    """What PyTorch's allocator knows, which needs no waiting for the device."""

    def __init__(self, memory_limit: int | None) -> None:
        self.memory_limit = memory_limit

    def limit(self) -> int:
        # Others may use the device, too.
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
        """Give back what the allocator keeps, where other sizes will be asked for."""
        torch.cuda.empty_cache()


class SpendMemory(TrainerCallback):
    """Moves the layers of the model of a Trainer as Spending decides, and tells when it is done.

    All ranks decide alike, by the one with the least memory left: layers that gather their weights must do so on all of them.

    splits  parts of a batch at most
    """

    def __init__(self, memory: Memory, tell: Callable[[str], object], splits: int = 1) -> None:
        self.memory, self.tell, self.splits = memory, tell, splits
        self.spending: Spending | None = None
        self._products = checkpointing.Products()
        self._layers: list[Any] = []
        self._hooks: list[Any] = []
        self._entered: int | None = None
        self._last: tuple[int, int] | None = None
        self._has_state = False
        self._retries = 0

    @property
    def parts(self) -> int:
        """So many the Trainer shall take a batch in."""
        return self.spending.parts if self.spending else 1

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **more: Any) -> None:
        self._layers = checkpointing.layers(model)
        if self._layers:
            last = self._layers[-1]
            self._hooks = [last.register_forward_pre_hook(self._begins), last.register_forward_hook(self._ends)]

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self._hooks:
            self._entered = self._last = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **more: Any
    ) -> None:
        # The first step makes the state of the optimizer, unless a scaled loss overflowed; the second one is the first with it.
        if self._last is None or not self._had_state(state, optimizer):
            return
        if self.spending is None:
            alike = len({_weights(layer) for layer in self._layers}) == 1
            limit = _least(self.memory.limit(), args.device)
            self.spending, self._retries = Spending(len(self._layers), limit, alike, self.splits), self.memory.retries()
        if self.spending.settled and _ranks() > 1:
            # To ask the others would make every step wait for the device.
            return
        retries, self._retries = self._retries, self.memory.retries()
        seen = [_most(value, args.device) for value in (self.memory.peak(), *self._last, self._retries - retries)]
        kept = [self.spending.keeps(place) for place in range(len(self._layers))]
        moves, parts = self.spending.moves, self.parts
        self.spending.after(Seen(seen[0], seen[1], seen[2], retried=seen[3] > 0))
        if self.parts != parts:
            self.memory.tidy()
        for place, layer in enumerate(self._layers):
            if self.spending.keeps(place) is not kept[place]:
                checkpointing.keep(layer, self.spending.keeps(place), self._products)
        if self.spending.settled and (self._hooks or moves != self.spending.moves):
            self._end(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self._hooks:
            self._end(state.global_step)

    def _had_state(self, state: TrainerState, optimizer: Any) -> bool:
        had, self._has_state = self._has_state, _has_state(optimizer)
        return had and self._has_state

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        # Later calls in a step recompute, or are of another micro-batch.
        if self._entered is None:
            self._entered = self.memory.allocated()

    def _ends(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._last is None and self._entered is not None:
            self._last = (self._entered, self.memory.allocated() - self._entered)

    def _end(self, step: int) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.tell(f"--checkpoint auto: from step {step + 1} on {_summary(self._layers, self.spending)}.")


def observers(setup: Setup, tell: Callable[[str], object]) -> Sequence[SpendMemory]:
    """The callbacks that a setup's checkpointing needs in the Trainer; `tell` gets sentences."""
    return [SpendMemory(GPU(setup.memory_limit), tell, splits(setup))] if setup.checkpoint == "auto" else []


def splits(setup: Setup) -> int:
    """Parts of a batch at most: those that keep the GPU busy, where a backward pass does no more than add to gradients."""
    if setup.ranks > 1 or setup.shard != "none" or setup.optimizer == "galore-layerwise":
        return 1
    return max(1, min(setup.batch, setup.batch * setup.sequence // BUSY))


def _summary(layers: list[Any], spending: Spending | None) -> str:
    kept = [spending.keeps(place) if spending else Keeps.INPUT for place in range(len(layers))]
    again, products = kept.count(Keeps.INPUT), kept.count(Keeps.PRODUCTS)
    batch = f"a batch is taken in {spending.parts} parts, and " if spending and spending.parts > 1 else ""
    return f"{batch}{again} of {len(layers)} layers are computed again, {products} but for their products, {kept.count(Keeps.ALL)} are not"


def _has_state(optimizer: Any) -> bool:
    """DeepSpeed makes it before the first step, and has no `state` of its own; a layerwise optimizer has one for each weight."""
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
    """Of all ranks."""
    if _ranks() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return int(shared)


def _least(value: int, device: torch.device) -> int:
    return -_most(-value, device)
