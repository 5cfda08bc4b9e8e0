# SPDX-License-Identifier: Apache-2.0
"""`--compile graphs`: the forward and backward pass of a micro-batch as a CUDA graph, which the host launches as a
whole."""

from __future__ import annotations

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
from liger_train.compiling import problem

Inputs = Mapping[str, Tensor]
# Of the whole batch, by which the loss of a micro-batch is divided.
Tokens = Tensor | int | None
# Returns the loss, and adds gradients to those of the weights.
Step = Callable[[Inputs, Tokens], Tensor]
# (shapes of the inputs, whether there are gradients to add to)
Key = tuple[Any, bool]


class GPU:
    """Graphs that share a memory pool, recorded on a stream of their own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def rehearse(self, step: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        """Run a step; return the loss, and whether random numbers were drawn. Waiting for the GPU is an error."""
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn = generator.get_offset()
        mode = torch.cuda.get_sync_debug_mode()
        self.stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self.stream):
                loss = step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.current_stream().wait_stream(self.stream)
        return loss, generator.get_offset() != drawn

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Record a step without running it; return a function that replays it, and the tensor of its loss."""
        # Tensors in reference cycles would keep memory that the graph needs.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that pins memory for the data loader, may continue.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            loss = step()
        return graph.replay, loss


@dataclass(frozen=True)
class Recorded:
    """A graph, with the tensors that it reads and the loss that it writes."""

    inputs: dict[str, Tensor]
    tokens: Tensor | None
    replay: Callable[[], object]
    loss: Tensor


class Graphs:
    """Runs micro-batches eagerly until they are ready, then as CUDA graphs.

    The first ready call rehearses: it runs eagerly, but waiting for the device is an error, which ends in a note rather
    than in a failed capture. The next one records. There are two graphs per shape of the inputs: that of the first
    micro-batch of a step writes the gradients, that of the others adds to them. All share one set of gradients, which
    the weights refer to after each replay, since the optimizer drops them. If the first micro-batch of a step has
    another shape than the one recorded first, it runs eagerly.

    step       what runs a micro-batch without graphs
    ready      whether the step is as it will stay
    note       gets the reason when graphs are given up
    recording  a context around each recording
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
        self.graphs: dict[Key, Recorded] = {}
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.places: list[int] = []
        self.rehearsed = self.given_up = False

    def __call__(self, inputs: Inputs, tokens: Tokens) -> Tensor:
        if self.given_up or not self.ready():
            return self.step(inputs, tokens)
        # A number would be the same in every replay.
        tokens = None if tokens is None else torch.as_tensor(tokens, device=self.weights[0].device)
        adding = any(weight.grad is not None for weight in self.weights)
        key = (tuple((name, value.shape, value.dtype) for name, value in inputs.items()), tokens is None), adding
        if key not in self.graphs:
            if adding != bool(self.gradients):
                # The first recording is that of a first micro-batch, and the only one that makes gradients.
                return self.step(inputs, tokens)
            if not self.rehearsed:
                return self._rehearse(inputs, tokens)
            if not self._record(key, inputs, tokens):
                return self.step(inputs, tokens)
        return self._replay(self.graphs[key], inputs, tokens, adding=adding)

    def _rehearse(self, inputs: Inputs, tokens: Tensor | None) -> Tensor:
        self.rehearsed = True
        try:
            self.device = self.device or GPU()
            loss, drew = self.device.rehearse(partial(self.step, inputs, tokens))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._give_up(f"a step must not wait for the GPU, but one does: {problem(error)}")
            # There were none before.
            for weight in self.weights:
                weight.grad = None
            return self.step(inputs, tokens)
        checkpointed = [layer for layer in layers(self.model) if layer.gradient_checkpointing]
        if any(getattr(getattr(layer, CHECKPOINT, None), "func", None) is not checkpoint for layer in checkpointed):
            self._give_up(
                "layers are recomputed by other means than torch.utils.checkpoint, such as from offloaded inputs"
            )
        elif drew and checkpointed:
            self._give_up(
                "layers that are recomputed draw random numbers, as dropout does, and a graph cannot draw the same "
                "again"
            )
        elif not drew:
            for layer in checkpointed:
                # Reading the state of the generator, to restore it in the backward pass, is not possible in a capture.
                setattr(layer, CHECKPOINT, partial(getattr(layer, CHECKPOINT), preserve_rng_state=False))
        return loss

    def _record(self, key: Key, inputs: Inputs, tokens: Tensor | None) -> bool:
        static_inputs = {name: value.to(self.weights[0].device, copy=True) for name, value in inputs.items()}
        count = None if tokens is None else tokens.clone()
        assert self.device is not None
        with self._given_gradients(), self.recording():
            try:
                replay, loss = self.device.capture(partial(self.step, static_inputs, count))
            except Exception as error:
                self._give_up(problem(error))
            else:
                self.graphs[key] = Recorded(static_inputs, count, replay, loss)
                if not self.gradients:
                    self.gradients = [(weight, weight.grad) for weight in self.weights if weight.grad is not None]
                    self.places = [weight.data_ptr() for weight in self.weights]
        return key in self.graphs

    @contextmanager
    def _given_gradients(self) -> Iterator[None]:
        """Restore the references to gradients on exit, because recording replaces them. It changes no values."""
        before = [weight.grad for weight in self.weights]
        self._refer()
        yield
        for weight, grad in zip(self.weights, before, strict=True):
            weight.grad = grad

    def _replay(self, graph: Recorded, inputs: Inputs, tokens: Tensor | None, *, adding: bool) -> Tensor:
        if self.places != [weight.data_ptr() for weight in self.weights]:
            self._give_up("the weights have moved to other memory, so they must stay where they are")
            return self.step(inputs, tokens)
        for name, value in inputs.items():
            graph.inputs[name].copy_(value, non_blocking=True)
        if graph.tokens is not None and tokens is not None:
            graph.tokens.copy_(tokens, non_blocking=True)
        if adding:
            self._refer()
        graph.replay()
        for weight, grad in self.gradients:
            weight.grad = grad
        # The next replay overwrites it.
        return graph.loss.clone()

    def _refer(self) -> None:
        """Copy the weights' gradients into the memory of the graphs, and make the weights refer to the copies."""
        for weight, grad in self.gradients:
            if weight.grad is not None and weight.grad is not grad:
                grad.copy_(weight.grad)
            elif weight.grad is None:
                continue
            weight.grad = grad

    def _give_up(self, reason: str) -> None:
        self.given_up = True
        self.graphs.clear()
        self.note(f"--compile graphs: training continues without CUDA graphs: {reason}.")
