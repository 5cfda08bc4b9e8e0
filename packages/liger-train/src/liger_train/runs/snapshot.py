# SPDX-License-Identifier: Apache-2.0
"""`liger train --snapshot`: memory over the first steps, by category."""

import json
import pickle
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers import TrainerCallback

from liger_bench import machine
from liger_bench.memory import CpuAllocations, storages
from liger_hf.private_transformers import GradientCheckpointingLayer
from liger_train.row import chosen_options
from liger_train.setup import Setup
from liger_train.timeline import CHECKPOINTS, GRADIENTS, OPTIMIZER, WEIGHTS, Event, Guess, Tag, logits_sizes, timeline

# The first step compiles kernels and allocates the optimizer state; the others are typical.
STEPS = 3
FOLDER = "snapshots"
MOST_EVENTS = 1_000_000


class Snapshot(TrainerCallback, AbstractContextManager["Snapshot"]):
    """A callback and context manager that writes a timeline of memory as a picture and as JSON to FOLDER/snapshots.

    The events come from the allocator, so workspaces of kernels count, too. Weights, gradients, optimizer state and
    inputs of checkpointed layers are recognized by address, logits by size; everything else is "other". On a GPU it
    also writes PyTorch's snapshot (.pickle), which opens in https://docs.pytorch.org/memory_viz.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.path = setup, folder / FOLDER / name_of(setup)
        self.tags: list[Tag] = []
        self.starts: list[float] = []
        self._recorder: _Cpu | _Gpu | None = None
        self._recording = ExitStack()
        self._trace: _Trace | None = None
        self._handles: list[Any] = []
        self._updates: list[list[float]] = []
        self._logits: Guess = lambda size, time: None

    def __exit__(self, *_: object) -> None:
        """Write the files, even if the run ran out of memory."""
        self._stop()
        if self._trace is not None:
            self._write(self._trace)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        model, optimizer = more["model"], more["optimizer"]
        # The Trainer may be started several times; the last time counts.
        self._stop()
        self.tags, self.starts, self._updates = [], [], []
        config = model.config.get_text_config()
        fused = self.setup.liger == "all" or "linear_cross_entropy" in self.setup.liger
        tokens = None if fused else self.setup.batch * self.setup.sequence
        self._logits = logits_sizes(config.vocab_size, config.hidden_size, tokens)
        # These tags give the categories of memory allocated before the first event.
        initial = self._tag(WEIGHTS, model.parameters())
        initial |= self._tag(WEIGHTS, model.buffers())
        initial |= self._tag(GRADIENTS, (p.grad for p in model.parameters()))
        initial |= self._tag(OPTIMIZER, _state(optimizer))
        self._hook(model)
        self._recorder = _Gpu() if self.setup.device == "cuda" else _Cpu(initial)
        self._recording.enter_context(self._recorder)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recorder is not None:
            self.starts.append(_now())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self._recorder is not None:
            self._tag(GRADIENTS, (p.grad for p in model.parameters()))
            self._updates.append([_now(), float("inf")])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recorder is not None and self._updates:
            self._updates[-1][1] = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._recorder is None:
            return
        self._tag(OPTIMIZER, _state(more["optimizer"]))
        self._tag(WEIGHTS, more["model"].parameters())
        if len(self.starts) == STEPS:
            self._stop()

    def _hook(self, model: Any) -> None:
        """Tag the inputs of layers and every gradient as soon as they exist."""

        def tag_layer(module: Any, inputs: tuple[Any, ...]) -> None:
            if getattr(module, "gradient_checkpointing", False) and module.training:
                self._tag(CHECKPOINTS, inputs[:1])
            self._tag(WEIGHTS, module.parameters())

        def tag_gathered(module: Any, inputs: tuple[Any, ...]) -> None:
            self._tag(WEIGHTS, module.parameters(recurse=False))

        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                self._handles.append(module.register_forward_pre_hook(tag_layer))
            # Only modules that already have hooks, such as those with which ZeRO-3 gathers weights: Liger does not
            # replace modules with hooks.
            elif module._forward_pre_hooks and next(module.parameters(recurse=False), None) is not None:
                self._handles.append(module.register_forward_pre_hook(tag_gathered))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(lambda p: self._tag(GRADIENTS, (p.grad,)) and None)
                )

    def _guess(self, size: int, time: float) -> str | None:
        """Recognize logits by size, except during the update, which may allocate memory of the LM head's size."""
        return None if any(start <= time < end for start, end in self._updates) else self._logits(size, time)

    def _tag(self, category: str, tensors: Iterable[Any]) -> dict[int, int]:
        """Tag the storages of tensors with a category; return address → bytes."""
        now = _now()
        on_device = (each for each in storages([*tensors]) if each.device.type == self.setup.device)
        sizes = {each.data_ptr(): each.nbytes() for each in on_device if each.data_ptr()}
        self.tags += [Tag(now, address, category) for address in sizes]
        return sizes

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recording.close()
            self._trace = self._recorder.trace()
            self._recorder = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _write(self, trace: "_Trace") -> None:
        from liger_train.report.timelines import timeline_picture

        start = self.starts[1] if len(self.starts) > 1 else float("-inf")
        line = timeline(trace.initial, trace.events, self.tags, self._guess, self.starts, start)
        record = {"setup": asdict(self.setup), **asdict(line), "peak": line.peak, "asked": trace.requested}
        record |= machine.describe(torch.device(self.setup.device))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{self.path}.json").write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
        if trace.snapshot is not None:
            with open(f"{self.path}.pickle", "wb") as file:
                pickle.dump(trace.snapshot, file)
        timeline_picture([record], Path(f"{self.path}.png"))


def name_of(setup: Setup) -> str:
    """Return a file name for a run: model, size and Liger, then the other options that are not the defaults."""
    model, liger = setup.model.strip("/").replace("/", "--"), setup.liger.replace(",", "+")
    chosen = chosen_options(asdict(setup)).items()
    words = [value if name == "precision" else f"{name}-{value}" for name, value in chosen]
    return "-".join([model, f"{setup.batch}x{setup.sequence}", liger, *words])


class _Trace(NamedTuple):
    """The allocations of a run.

    initial    address → bytes of the blocks allocated before the first event
    requested  bytes of the allocation that failed, if any
    snapshot   PyTorch's snapshot
    """

    initial: dict[int, int]
    events: list[Event]
    requested: int | None = None
    snapshot: Any = None


class _Gpu:
    def __enter__(self) -> Self:
        # Without stacks of releases: recording them loses the exception with which a checkpoint stops early
        # (https://github.com/pytorch/pytorch/issues/179536).
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_EVENTS)
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        self._snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)

    def trace(self) -> _Trace:
        return from_snapshot(self._snapshot, torch.cuda.current_device())


def from_snapshot(snapshot: dict[str, Any], device: int) -> _Trace:
    """Return the events of PyTorch's snapshot, and the memory before them, reconstructed backward from the end."""
    log = snapshot["device_traces"][device]
    actions = {"alloc": 1, "free_requested": -1}
    events = [Event(e["time_us"], e["addr"], actions[e["action"]] * e["size"]) for e in log if e["action"] in actions]
    blocks = (block for segment in snapshot["segments"] if segment["device"] == device for block in segment["blocks"])
    initial = {b["address"]: b["requested_size"] for b in blocks if b["state"] == "active_allocated"}
    for event in reversed(events):
        if event.bytes > 0:
            initial.pop(event.address, None)
        else:
            initial[event.address] = -event.bytes
    failed = next((e for e in log if e["action"] == "oom"), None)
    if failed is not None:
        # Later releases are not part of the run.
        events = [event for event in events if event.time <= failed["time_us"]]
    return _Trace(initial, events, None if failed is None else failed["size"], snapshot)


class _Cpu(CpuAllocations):
    def __init__(self, initial: dict[int, int]) -> None:
        self.initial = initial

    def trace(self) -> _Trace:
        return _Trace(self.initial, [Event(*event) for event in self.events()])


def _state(optimizer: Any) -> list[Any]:
    """Return the states of an optimizer, or nothing if a wrapper hides them."""
    return list(getattr(optimizer, "state", {}).values())


def _now() -> float:
    """Return the current time in microseconds, on the clock of the events."""
    return time.time_ns() / 1e3
