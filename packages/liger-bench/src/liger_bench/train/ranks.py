# SPDX-License-Identifier: Apache-2.0
"""The processes of one training, as torchrun starts them: how many there are, and which of them speaks."""

from __future__ import annotations

import os
from datetime import timedelta

from liger_bench.ending import end

FAILED = 1


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def speaks(*, failed: bool) -> bool:
    """Whether this process prints and writes for all: the first rank, but of ranks that fail the one that failed first.

    The first rank may be waiting for one that failed, and will then never speak.
    """
    if count() == 1:
        return True
    if not failed:
        return first()
    from torch.distributed import TCPStore

    try:
        # The store by which torchrun's processes have met.
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*where, is_master=False, timeout=timedelta(seconds=10))
        return bool(store.add("liger/failed", 1) == 1)
    except (KeyError, RuntimeError):
        return True


def leave(code: int) -> None:
    """Part from the other ranks and end with this exit code; one that failed makes torchrun end the others. Nothing without any."""
    import torch.distributed as dist

    if not dist.is_initialized() and count() == 1:
        return
    # Ranks that wait for one that failed would never come to a barrier.
    if code != FAILED and dist.is_initialized():
        # The first one is still writing, and torchrun ends it as soon as another one ends with an exit code.
        dist.barrier()
        dist.destroy_process_group()
    end(code)
