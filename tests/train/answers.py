# SPDX-License-Identifier: Apache-2.0
"""What a process of a sweep does in these tests: quickly one of the things that can happen to a run."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

from liger_bench.process import DONE, READY, Answer, failure
from liger_train.row import row_of

WHERE = {"machine": "Some CPU", "versions": "torch 9.9", "commit": "abc", "date": "2026-11-21T10:00:00+00:00"}
# Batches that say what happens; all others train.
OUT_OF_MEMORY, KILLED, LATE, BROKEN = 64, 7, 8, 9


def answer(job: None, connection: Connection) -> Answer:
    connection.send((READY, {}))
    setup, _ = connection.recv()
    begun = time.monotonic()
    try:
        if setup.batch == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if setup.batch == LATE:
            time.sleep(60)
        if setup.batch == BROKEN:
            raise ValueError("no such layer")
        if setup.batch >= OUT_OF_MEMORY:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB.")
        # Long enough that runs on two places overlap.
        time.sleep(0.3)
    except Exception as error:
        return failure(error)
    variables = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    notes = [
        f"{os.getpid()}",
        f"{variables['CUDA_VISIBLE_DEVICES']}",
        f"{variables['OMP_NUM_THREADS']}",
        f"{begun}",
        f"{time.monotonic()}",
    ]
    return DONE, {"row": row_of(setup, WHERE, {"tokens_per_second": 10.0, "notes": notes})}
