# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing with the inputs of layers in host memory, copied while the device computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Offloading:
    """Checkpoints layers that share it, and offloads the first argument of each, its hidden states.

    The copy to the host starts with the forward pass of the layer, and the device frees its memory at the end of that.
    The copy back starts when the backward pass reaches the offloaded layer after it, so that the device holds at most
    two of these inputs. Both copies are on a stream of their own; a device without streams, such as the CPU, copies in
    place. PyTorch's `save_on_cpu` copies on the stream that computes.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._last: Callable[[], _Input | None] = lambda: None

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        copies: list[_Input] = []
        # Not the tensor itself: the graph keeps `pack`, and that would keep the tensor on the device.
        hidden = _place(args[0]) if args and isinstance(args[0], Tensor) else None

        def pack(tensor: Tensor) -> Tensor | _Input:
            if type(tensor) is not Tensor or _place(tensor) != hidden:
                return tensor
            copies.append(_Input(tensor, self._stream(tensor.device), self._last))
            self._last = weakref.ref(copies[-1])
            return copies[-1]

        with saved_tensors_hooks(pack, _unpack):
            output = checkpoint(function, *args, use_reentrant=False)
        for copy in copies:
            copy.leave()
        return output

    def _stream(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]


class _Input:
    """The input of one layer, in host memory, on the device, or both; `before` gives that of the layer before, as long
    as its graph exists."""

    def __init__(self, tensor: Tensor, stream: Any, before: Callable[[], _Input | None]) -> None:
        self.device, self.stream, self.before = tensor.device, stream, before
        self.taken = False
        self.here: Tensor | None = tensor.detach()
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        self._copy(self.host, self.here)

    def leave(self) -> None:
        """Free the memory of the device, in the order of its computation: that waits here if the copy takes longer than
        the layer."""
        self._wait()
        self.here = None

    def fetch(self) -> None:
        """Start the copy back, unless it has started."""
        if self.here is None:
            self.here = torch.empty_like(self.host, device=self.device, pin_memory=False)
            self._copy(self.here, self.host)

    def take(self) -> Tensor:
        """The tensor on the device; the copy of the one before starts."""
        self.fetch()
        before = self.before()
        if before is not None and not before.taken:
            before.fetch()
        self._wait()
        tensor, self.here, self.taken = self.here, None, True
        assert tensor is not None
        return tensor

    def _copy(self, to: Tensor, of: Tensor) -> None:
        if self.stream is None:
            to.copy_(of)
            return
        # The source must be computed, and whatever had the memory of the target must be done with it.
        self.stream.wait_stream(self._computing())
        with torch.get_device_module(self.device).stream(self.stream):
            to.copy_(of, non_blocking=True)
        self.copied = self.stream.record_event()

    def _wait(self) -> None:
        if self.stream is not None:
            self._computing().wait_event(self.copied)

    def _computing(self) -> Any:
        return torch.get_device_module(self.device).current_stream(self.device)


def _unpack(packed: Tensor | _Input) -> Tensor:
    return packed.take() if isinstance(packed, _Input) else packed


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    """Identifies an argument among saved tensors: autograd hands hooks a new Python object."""
    return tensor.data_ptr(), tensor.shape
