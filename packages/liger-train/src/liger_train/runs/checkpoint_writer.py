# SPDX-License-Identifier: Apache-2.0
"""Write sharded checkpoints on a thread, from a copy in host memory, while training continues."""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from liger_bench.memory import held_bytes
from liger_train import ranks
from liger_train.runs import host_memory

THREAD = "checkpoint-writer"


class CheckpointWriter(contextlib.AbstractContextManager["CheckpointWriter"]):
    """Writes one checkpoint at a time; as a context, it waits for the last one, except after Ctrl-C.

    device      the device of this rank
    on_failure  called on the thread if a checkpoint could not be written
    """

    def __init__(self, device: torch.device, on_failure: Callable[[], object]) -> None:
        self._device, self._on_failure = device, on_failure
        self._group: Any = None
        self._jobs: list[Callable[[Any], None]] = []
        self._in_place = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            # After an error, the previous checkpoint is still worth completing.
            with contextlib.suppress(Exception):
                self.wait()

    def connect(self) -> None:
        """Make a process group for the thread: the ranks exchange which rank writes what, while training uses others.

        All ranks must call this.
        """
        self._group = dist.new_group(backend="gloo")

    def add(self, state: dict[str, Any], function: Callable[[dict[str, Any], Any], None]) -> None:
        """Write a state with the next checkpoint, by function(state, process group); training may change the state."""
        # All ranks of a machine copy at the same time. The other half is for buffers of files.
        if held_bytes([state]) * ranks.on_this_machine() <= host_memory.available_bytes() // 2:
            state = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
        else:
            self._in_place = True
        self._jobs.append(partial(function, state))

    @property
    def has_states(self) -> bool:
        return bool(self._jobs)

    def start(self, seal: Callable[[], None]) -> None:
        """Write the added states, then call `seal` on the first rank; all ranks must call this.

        Wait for it if a state could not be copied.
        """
        self._thread = threading.Thread(target=self._write, args=(self._jobs, seal), name=THREAD, daemon=True)
        self._jobs = []
        self._thread.start()
        if self._in_place:
            self._in_place = False
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint, and raise the error that prevented it; all ranks of a checkpoint raise the same."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, jobs: list[Callable[[Any], None]], seal: Callable[[], None]) -> None:
        try:
            if self._device.type == "cuda":
                # A new thread would allocate on the first GPU.
                torch.cuda.set_device(self._device)
            while jobs:
                # Without a reference to the job, its copy is freed before the next one is written.
                jobs.pop(0)(self._group)
            self._seal(seal)
        except BaseException as error:
            self._error = error
            self._on_failure()

    def _seal(self, seal: Callable[[], None]) -> None:
        shared: list[BaseException | None] = [None]
        if ranks.first():
            try:
                seal()
            except Exception as error:
                shared[0] = error
        dist.broadcast_object_list(shared, group=self._group)
        if shared[0] is not None:
            raise shared[0]
