# SPDX-License-Identifier: Apache-2.0
"""`liger train --snapshot`: memory during the first steps, by category."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterable
from contextlib import ExitStack
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
from liger_train.timeline import (
    CHECKPOINTS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    Event,
    Guess,
    Tag,
    logits_sizes,
    timeline,
)

# In the first step kernels are compiled and the optimizer state is allocated; the others are typical.
STEPS = 3
FOLDER = "snapshots"
MOST_EVENTS = 1_000_000


class Snapshot(TrainerCallback):
    """A callback and context manager that writes a picture, the timeline as JSON, and on a GPU PyTorch's snapshot to
    FOLDER/snapshots.

    The events come from the allocator, so the workspaces of kernels count, too. Their category follows from the
    addresses of weights, gradients, optimizer state and the inputs of checkpointed layers, and from the size of logits;
    the rest is "other". The snapshot (.pickle) opens in https://docs.pytorch.org/memory_viz.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.path = setup, folder / FOLDER / name_of(setup)
        self.tags: list[Tag] = []
        self.starts: list[float] = []
        self._recorder: _Cpu | _Gpu | None = None
        self._recording = ExitStack()
        self._recorded: _Recorded | None = None
        self._handles: list[Any] = []
        self._updates: list[list[float]] = []
        self._logits: Guess = lambda size, time: None

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the recording, even if the run ran out of memory."""
        self._stop()
        if self._recorded is not None:
            self._write(self._recorded)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        model, optimizer = more["model"], more["optimizer"]
        # --batch auto trains several times; the last run counts.
        self._stop()
        self.tags, self.starts, self._updates = [], [], []
        config = model.config.get_text_config()
        fused = self.setup.liger == "all" or "linear_cross_entropy" in self.setup.liger
        tokens = None if fused else self.setup.batch * self.setup.sequence
        self._logits = logits_sizes(config.vocab_size, config.hidden_size, tokens)
        # Before the optimizer has state. These tags give the categories of memory allocated before the first event.
        held = self._tag(WEIGHTS, model.parameters())
        held |= self._tag(WEIGHTS, model.buffers())
        held |= self._tag(GRADIENTS, (p.grad for p in model.parameters()))
        held |= self._tag(OPTIMIZER, _state(optimizer))
        self._hook(model)
        self._recorder = _Gpu() if self.setup.device == "cuda" else _Cpu(held)
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

        def layer(module: Any, inputs: tuple[Any, ...]) -> None:
            if getattr(module, "gradient_checkpointing", False) and module.training:
                self._tag(CHECKPOINTS, inputs[:1])
            self._tag(WEIGHTS, module.parameters())

        def gathered(module: Any, inputs: tuple[Any, ...]) -> None:
            self._tag(WEIGHTS, module.parameters(recurse=False))

        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                self._handles.append(module.register_forward_pre_hook(layer))
            # Only on modules that have hooks already, such as those by which ZeRO-3 gathers weights: Liger does not
            # fuse modules with hooks.
            elif module._forward_pre_hooks and next(module.parameters(recurse=False), None) is not None:
                self._handles.append(module.register_forward_pre_hook(gathered))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(lambda p: self._tag(GRADIENTS, (p.grad,)) and None)
                )

    def _guess(self, size: int, time: float) -> str | None:
        """Logits by size, except during the update: the optimizer may allocate memory of the size of the LM head."""
        return None if any(start <= time < end for start, end in self._updates) else self._logits(size, time)

    def _tag(self, category: str, tensors: Iterable[Any]) -> dict[int, int]:
        """Tag these tensors with a category; returns address → bytes."""
        now = _now()
        sizes = {
            s.data_ptr(): s.nbytes()
            for tensor in tensors
            for s in storages(tensor)
            if s.device.type == self.setup.device
        }
        self.tags += [Tag(now, address, category) for address in sizes if address]
        return {address: size for address, size in sizes.items() if address}

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recording.close()
            self._recorded = self._recorder.recorded()
            self._recorder = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _write(self, recorded: _Recorded) -> None:
        from liger_train.report.timelines import timeline_picture

        start = self.starts[1] if len(self.starts) > 1 else float("-inf")
        line = timeline(recorded.held, recorded.events, self.tags, self._guess, self.starts, start)
        record = {"setup": asdict(self.setup), **line.columns(), "peak": line.peak, "asked": recorded.requested}
        record |= machine.describe(torch.device(self.setup.device))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _beside(self.path, ".json").write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
        if recorded.snapshot is not None:
            with _beside(self.path, ".pickle").open("wb") as file:
                pickle.dump(recorded.snapshot, file)
        timeline_picture([record], _beside(self.path, ".png"))


def name_of(setup: Setup) -> str:
    """A file name for a run: model, size and Liger, then every option that affects memory and is not the default."""
    model, liger = setup.model.strip("/").replace("/", "--"), setup.liger.replace(",", "+")
    chosen = chosen_options(asdict(setup)).items()
    words = [value if name == "precision" else f"{name}-{value}" for name, value in chosen]
    return "-".join([model, f"{setup.batch}x{setup.sequence}", liger, *words])


class _Recorded(NamedTuple):
    """A recording: address → bytes from before, events, and the size of the allocation that failed."""

    held: dict[int, int]
    events: list[Event]
    requested: int | None = None
    snapshot: Any = None


class _Gpu:
    def __enter__(self) -> Self:
        # Not the stacks of releases: recording them loses the exception by which a checkpoint stops early
        # (https://github.com/pytorch/pytorch/issues/179536).
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_EVENTS)
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        self._snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)

    def recorded(self) -> _Recorded:
        return from_snapshot(self._snapshot, torch.cuda.current_device())


def from_snapshot(snapshot: dict[str, Any], device: int) -> _Recorded:
    """The events of PyTorch's snapshot, and the memory before them, reconstructed backwards from the end."""
    trace = snapshot["device_traces"][device]
    actions = {"alloc": 1, "free_requested": -1}
    events = [Event(e["time_us"], e["addr"], actions[e["action"]] * e["size"]) for e in trace if e["action"] in actions]
    held: dict[int, int] = {}
    for segment in snapshot["segments"]:
        # In older versions only the first block of a segment has an address; blocks are contiguous.
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and segment["device"] == device:
                held[block.get("address", address)] = block.get("requested_size", block["size"])
            address += block["size"]
    for event in reversed(events):
        if event.bytes > 0:
            held.pop(event.address, None)
        else:
            held[event.address] = -event.bytes
    failed = next((e for e in trace if e["action"] == "oom"), None)
    if failed is not None:
        # Releases after that are not part of the run.
        events = [event for event in events if event.time <= failed["time_us"]]
    return _Recorded(held, events, None if failed is None else failed["size"], snapshot)


class _Cpu(CpuAllocations):
    def __init__(self, held: dict[int, int]) -> None:
        self.held = held

    def recorded(self) -> _Recorded:
        return _Recorded(self.held, [Event(*event) for event in self.events()])


def _state(optimizer: Any) -> list[Any]:
    """The tensors of an optimizer, unless a wrapper hides them."""
    return list(getattr(optimizer, "state", {}).values())


def _now() -> float:
    """The current time in microseconds, on the clock of the events."""
    return time.time_ns() / 1e3


def _beside(path: Path, suffix: str) -> Path:
    """The path with a suffix; with_suffix would replace the end of llama-3.2-1b."""
    return path.with_name(path.name + suffix)
