# SPDX-License-Identifier: Apache-2.0
"""The ranks that torchrun starts: how many there are, and which one prints."""

import os
from datetime import timedelta

from liger_bench.ending import end

FAILED = 1


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_this_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", count()))


def started() -> bool:
    """Return whether torchrun, or another launcher, started this process."""
    return "WORLD_SIZE" in os.environ


def first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def reports(*, failed: bool, error: str = "") -> bool:
    """Return whether this process prints and writes for all ranks: the first rank, or the one that failed first.

    If another rank failed, the first rank may wait for it forever. An error that each restart repeats is reported once.
    """
    if count() == 1:
        return True
    if not failed:
        return first()
    from torch.distributed import TCPStore

    try:
        # The store of torchrun's rendezvous, which outlives its restarts.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=10))
        return bool(store.add(f"liger/failed/{error or os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) == 1)
    except (KeyError, RuntimeError):
        # The machine of the store is lost: one rank of each other machine reports.
        return os.environ.get("LOCAL_RANK", "0") == "0"


def leave(code: int) -> None:
    """Exit with this code, unless this is the only process; after a failure, torchrun stops the other ranks."""
    import torch.distributed as dist

    if not dist.is_initialized() and count() == 1:
        return
    # After a failure, the other ranks may never reach a barrier.
    if code != FAILED and dist.is_initialized():
        # The first rank may still be writing, and torchrun stops it as soon as another rank exits with a nonzero code.
        dist.barrier()
        dist.destroy_process_group()
    end(code)
