# SPDX-License-Identifier: Apache-2.0
"""New memory for tests: NaN inside, and guard bytes on both sides.

An element that is never written stays NaN. A store past the end of a tensor, as by a missing mask, changes a guard
instead of the heap, and the next check names the kernel and the tensor; a load from there reads NaN.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from liger_core.kernels import Kernel

# Bytes on each side of a tensor, more than the longest block of a kernel reaches past a row. As floats they are NaN.
GUARD, PATTERN = 1 << 15, 255
# A value that no kernel computes by accident.
SENTINEL = -7_777_777
NEW = [(torch, name) for name in ("empty", "empty_like", "empty_strided")]
NEW += [(Tensor, name) for name in ("new_empty", "new_empty_strided")]
ZEROED = ((torch, "zeros"), (torch, "zeros_like"), (Tensor, "new_zeros"))
EMPTY, FULL = torch.empty, torch.full


@dataclass
class Guarded:
    """A tensor's memory with its guards, and its name in messages."""

    buffer: Tensor
    name: str

    def damage(self) -> str | None:
        """How many guard bytes changed, or None."""
        counts = {"before": self.buffer[:GUARD], "after": self.buffer[-GUARD:]}
        changed = {side: int((guard != PATTERN).sum()) for side, guard in counts.items()}
        found = [f"{count} bytes {side} it" for side, count in changed.items() if count]
        return f"{self.name}: {' and '.join(found)}" if found else None


class GuardedMemory:
    """Every tensor made since the start, each between guards that `check` looks at."""

    def __init__(self) -> None:
        self.held: dict[int, Guarded] = {}

    @contextmanager
    def installed(self) -> Iterator["GuardedMemory"]:
        """Guard what the functions of torch for new memory return, and check after every kernel."""
        with pytest.MonkeyPatch.context() as patch:
            self._install(patch)
            yield self

    def _install(self, patch: pytest.MonkeyPatch) -> None:
        for owner, name in NEW:
            patch.setattr(owner, name, self._making(getattr(owner, name), zeroed=False))
        for owner, name in ZEROED:
            patch.setattr(owner, name, self._making(getattr(owner, name), zeroed=True))
        execute = Kernel.execute

        def checked(kernel: Kernel, args: Any, allocate: Any) -> Any:
            outputs = execute(kernel, args, allocate)
            for result, output in zip(kernel.schema.returns, outputs, strict=True):
                if isinstance(output, Tensor) and (guarded := self.held.get(output.untyped_storage().data_ptr())):
                    guarded.name = f"{result.name} {tuple(output.shape)}"
            self.check(kernel.name)
            return outputs

        patch.setattr(Kernel, "execute", checked)

    def check(self, writer: str) -> None:
        """Fail if anything was written outside a tensor since the last check."""
        damaged = [damage for guarded in self.held.values() if (damage := guarded.damage())]
        if damaged:
            # The next write must not be blamed for it.
            self.held.clear()
            raise AssertionError(f"{writer} wrote outside its tensors: {'; '.join(damaged)}")

    def _making(self, make: Callable[..., Tensor], *, zeroed: bool) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            plain = make(*args, **kwargs)
            if plain.device.type == "meta" or isinstance(plain, FakeTensor):
                return plain
            with torch.no_grad():
                tensor = self._guarded(plain)
                if zeroed:
                    return tensor.zero_()
                if tensor.dtype == torch.bool:
                    return tensor
                if tensor.is_floating_point():
                    return tensor.fill_(torch.nan)
                return tensor.fill_(SENTINEL % torch.iinfo(tensor.dtype).max)

        return made

    def _guarded(self, plain: Tensor) -> Tensor:
        """A tensor like this one; not a view, so that autograd takes it for one of its own."""
        last = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
        span = last + 1 if plain.numel() else 0
        buffer = FULL((2 * GUARD + span * plain.element_size(),), PATTERN, dtype=torch.uint8, device=plain.device)
        storage = buffer.untyped_storage()
        self.held[storage.data_ptr()] = Guarded(buffer, f"{tuple(plain.shape)} made by {_maker()}")
        tensor = EMPTY(0, dtype=plain.dtype, device=plain.device)
        return tensor.set_(storage, GUARD // plain.element_size(), plain.shape, plain.stride())


def _maker() -> str:
    """The nearest line of ours that asked for memory."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
