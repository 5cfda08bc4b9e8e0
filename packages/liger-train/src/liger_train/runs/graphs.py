# SPDX-License-Identifier: Apache-2.0
"""`--compile graphs`: the forward and backward pass of a micro-batch as one CUDA graph."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_hf.private_transformers import CHECKPOINT
from liger_train.checkpointing import layers
from liger_train.compiling import first_line
from liger_train.errors import release_frames

Inputs = Mapping[str, Tensor]
# The number of tokens in the whole batch, by which the loss of a micro-batch is divided.
Tokens = Tensor | int | None
# (inputs, tokens) → the loss; accumulates gradients in the weights.
Step = Callable[[Inputs, Tokens], Tensor]
# (shapes of the inputs, whether gradients are accumulated onto existing ones)
Key = tuple[Any, bool]


class GPU:
    """Records graphs that share a memory pool, on a stream of their own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def rehearse(self, step: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        """Run a step; return its loss, and whether it drew random numbers. Synchronizing with the GPU is an error."""
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        offset = generator.get_offset()
        mode = torch.cuda.get_sync_debug_mode()
        self.stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self.stream):
                loss = step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.current_stream().wait_stream(self.stream)
        return loss, generator.get_offset() != offset

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Record a step without running it; return a function that replays it, and the tensor of its loss."""
        # Tensors in reference cycles would occupy memory that the graph needs.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that pins memory for the data loader, may continue.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            loss = step()
        return graph.replay, loss


@dataclass(frozen=True)
class RecordedGraph:
    """A graph, with the tensors that it reads and the loss that it writes."""

    inputs: dict[str, Tensor]
    tokens: Tensor | None
    replay: Callable[[], object]
    loss: Tensor


class Graphs:
    """Runs micro-batches eagerly until `ready`, then as CUDA graphs.

    The first ready call is a rehearsal: it runs eagerly, and synchronizing is an error, which leads to a note instead
    of a failed capture. The next call records. Each shape of the inputs has two graphs: the first micro-batch of a step
    writes the gradients, the others accumulate them. All graphs share one set of gradients. The optimizer drops the
    weights' gradients, so each replay sets them again. If the first micro-batch of a step has another shape than the
    one recorded first, it runs eagerly.

    step       runs a micro-batch without graphs
    ready      returns whether the step will not change any more
    note       gets the reason if graphs are given up
    recording  returns a context for each recording
    """

    def __init__(
        self,
        step: Step,
        model: nn.Module,
        ready: Callable[[], bool],
        note: Callable[[str], object],
        recording: Callable[[], AbstractContextManager[object]] = nullcontext,
        device: GPU | None = None,
    ) -> None:
        self.step, self.model, self.ready, self.note, self.recording = step, model, ready, note, recording
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.device = device
        self.graphs: dict[Key, RecordedGraph] = {}
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.addresses: list[int] = []
        self.rehearsed = self.given_up = False

    def __call__(self, inputs: Inputs, tokens: Tokens) -> Tensor:
        if self.given_up or not self.ready():
            return self.step(inputs, tokens)
        # A Python number would be constant in every replay.
        tokens = None if tokens is None else torch.as_tensor(tokens, device=self.weights[0].device)
        accumulates = any(weight.grad is not None for weight in self.weights)
        key = (tuple((name, value.shape, value.dtype) for name, value in inputs.items()), tokens is None), accumulates
        if key not in self.graphs:
            if accumulates != bool(self.gradients):
                # Only the recording of a first micro-batch allocates gradients, and only once.
                return self.step(inputs, tokens)
            if not self.rehearsed:
                return self._rehearse(inputs, tokens)
            if not self._record(key, inputs, tokens):
                return self.step(inputs, tokens)
        return self._replay(self.graphs[key], inputs, tokens, accumulates=accumulates)

    def _rehearse(self, inputs: Inputs, tokens: Tensor | None) -> Tensor:
        self.rehearsed = True
        try:
            self.device = self.device or GPU()
            loss, drew = self.device.rehearse(partial(self.step, inputs, tokens))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._give_up(f"a step must not wait for the GPU, but one does: {first_line(error)}")
            release_frames(error)
            # The failed step may have left some; before it there were none.
            for weight in self.weights:
                weight.grad = None
            return self.step(inputs, tokens)
        checkpointed = [layer for layer in layers(self.model) if layer.gradient_checkpointing]
        if any(getattr(getattr(layer, CHECKPOINT, None), "func", None) is not checkpoint for layer in checkpointed):
            self._give_up("layers are recomputed by other means than torch.utils.checkpoint, such as offloaded inputs")
        elif drew and checkpointed:
            self._give_up(
                "layers that are recomputed draw random numbers, as dropout does, and a graph cannot draw them again"
            )
        elif not drew:
            for layer in checkpointed:
                # A capture cannot read the state of the generator, to restore it in the backward pass.
                setattr(layer, CHECKPOINT, partial(getattr(layer, CHECKPOINT), preserve_rng_state=False))
        return loss

    def _record(self, key: Key, inputs: Inputs, tokens: Tensor | None) -> bool:
        static_inputs = {name: value.to(self.weights[0].device, copy=True) for name, value in inputs.items()}
        count = None if tokens is None else tokens.clone()
        assert self.device is not None
        with self._restored_gradients(), self.recording():
            try:
                replay, loss = self.device.capture(partial(self.step, static_inputs, count))
            except Exception as error:
                self._give_up(first_line(error))
                release_frames(error)
            else:
                self.graphs[key] = RecordedGraph(static_inputs, count, replay, loss)
                if not self.gradients:
                    self.gradients = [(weight, weight.grad) for weight in self.weights if weight.grad is not None]
                    self.addresses = self._addresses()
        return key in self.graphs

    @contextmanager
    def _restored_gradients(self) -> Iterator[None]:
        """Restore the weights' gradients on exit. Recording replaces the tensors, but does not change values."""
        gradients = [weight.grad for weight in self.weights]
        self._use_shared_gradients()
        yield
        for weight, grad in zip(self.weights, gradients, strict=True):
            weight.grad = grad

    def _replay(self, graph: RecordedGraph, inputs: Inputs, tokens: Tensor | None, *, accumulates: bool) -> Tensor:
        if self.addresses != self._addresses():
            self._give_up("the weights must stay at their addresses, but they have moved")
            return self.step(inputs, tokens)
        for name, value in inputs.items():
            graph.inputs[name].copy_(value, non_blocking=True)
        if graph.tokens is not None and tokens is not None:
            graph.tokens.copy_(tokens, non_blocking=True)
        if accumulates:
            self._use_shared_gradients()
        graph.replay()
        for weight, grad in self.gradients:
            weight.grad = grad
        # The next replay overwrites the loss.
        return graph.loss.clone()

    def _addresses(self) -> list[int]:
        # A DTensor has no memory of its own.
        return [getattr(weight, "_local_tensor", weight).data_ptr() for weight in self.weights]

    def _use_shared_gradients(self) -> None:
        """Copy the weights' gradients into the gradients that the graphs share, and set these on the weights."""
        for weight, grad in self.gradients:
            if weight.grad is not None and weight.grad is not grad:
                grad.copy_(weight.grad)
                weight.grad = grad

    def _give_up(self, reason: str) -> None:
        self.given_up = True
        self.graphs.clear()
        self.note(f"--compile graphs: training continues without CUDA graphs: {reason}.")
