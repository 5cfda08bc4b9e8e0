# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run, as torchrun starts them: how many there are, and which one prints."""

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
    """Whether this process prints and writes for all ranks: the first rank, or the one that failed first.

    The first rank may be waiting for a failed one forever.
    """
    if count() == 1:
        return True
    if not failed:
        return first()
    from torch.distributed import TCPStore

    try:
        # The store of torchrun's rendezvous.
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*where, is_master=False, timeout=timedelta(seconds=10))
        return bool(store.add("liger/failed", 1) == 1)
    except (KeyError, RuntimeError):
        return True


def leave(code: int) -> None:
    """Leave the other ranks and exit with this code; torchrun then stops the others if it is a failure.

    Without other ranks, do nothing.
    """
    import torch.distributed as dist

    if not dist.is_initialized() and count() == 1:
        return
    # Ranks that wait for a failed one never reach a barrier.
    if code != FAILED and dist.is_initialized():
        # The first rank may still be writing, and torchrun stops it as soon as another rank exits with a nonzero code.
        dist.barrier()
        dist.destroy_process_group()
    end(code)
