# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that keeps the inputs of layers in host memory, copied while the device computes."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Offloading:
    """Checkpoints the layers that share it, and offloads the first argument of each, its hidden states.

    The copy to the host starts with the forward pass of a layer; at its end the device memory is freed. The copy back
    starts when the backward pass reaches the next offloaded layer, so the device holds at most two of these inputs.
    Copies run on a stream of their own (PyTorch's `save_on_cpu` uses the stream that computes). A device without
    streams, such as the CPU, copies synchronously.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._last: Callable[[], _Input | None] = lambda: None

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        copies: list[_Input] = []
        # Not the tensor itself: the autograd graph holds `pack`, which would keep the tensor on the device.
        hidden = _identity(args[0]) if args and isinstance(args[0], Tensor) else None

        def pack(tensor: Tensor) -> Tensor | _Input:
            if type(tensor) is not Tensor or _identity(tensor) != hidden:
                return tensor
            copies.append(_Input(tensor, self._stream(tensor.device), self._last))
            self._last = weakref.ref(copies[-1])
            return copies[-1]

        with saved_tensors_hooks(pack, lambda packed: packed.take() if isinstance(packed, _Input) else packed):
            output = checkpoint(function, *args, use_reentrant=False)
        for copy in copies:
            copy.release()
        return output

    def _stream(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]


class _Input:
    """The input of a layer, in host memory, on the device, or both.

    previous  returns the input of the previous layer, while its graph exists
    """

    def __init__(self, tensor: Tensor, stream: Any, previous: Callable[[], "_Input | None"]) -> None:
        self.device, self.stream, self.previous = tensor.device, stream, previous
        self.used = False
        self.on_device: Tensor | None = tensor.detach()
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        self._copy(self.host, self.on_device)

    def release(self) -> None:
        """Free the device memory; the stream that computes waits here if the copy takes longer than the layer."""
        self._wait()
        self.on_device = None

    def fetch(self) -> None:
        """Start the copy back, unless it has started."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self._copy(self.on_device, self.host)

    def take(self) -> Tensor:
        """Return the tensor on the device, and start copying the input of the previous layer."""
        self.fetch()
        previous = self.previous()
        if previous is not None and not previous.used:
            previous.fetch()
        self._wait()
        tensor, self.on_device, self.used = self.on_device, None, True
        assert tensor is not None
        return tensor

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self.stream is None:
            target.copy_(source)
            return
        # The source must be computed, and the memory of the target must be free, before the copy starts.
        self.stream.wait_stream(self._computing())
        with torch.get_device_module(self.device).stream(self.stream):
            target.copy_(source, non_blocking=True)
        self.copied = self.stream.record_event()

    def _wait(self) -> None:
        if self.stream is not None:
            self._computing().wait_event(self.copied)

    def _computing(self) -> Any:
        return torch.get_device_module(self.device).current_stream(self.device)


def _identity(tensor: Tensor) -> tuple[int, torch.Size]:
    """Identify an argument among saved tensors, because autograd passes a new Python object to hooks."""
    return tensor.data_ptr(), tensor.shape
