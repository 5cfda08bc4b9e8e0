# SPDX-License-Identifier: Apache-2.0
"""What a process of a sweep does in these tests: quickly one of the things that can happen to a run."""

import json
import os
import signal
import sys
import time
from pathlib import Path

WHERE = {"machine": "Some CPU", "versions": "torch 9.9", "commit": "abc", "date": "2026-11-21T10:00:00+00:00"}
# Batches that say what happens; all others train.
OUT_OF_MEMORY, KILLED, LATE, BROKEN = 64, 7, 8, 9


def main(batch: int, out: Path) -> None:
    begun = time.monotonic()
    if batch == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if batch == LATE:
        time.sleep(60)
    if batch == BROKEN:
        raise ValueError("no such layer")
    # Long enough that runs on two GPUs overlap.
    time.sleep(0.3)
    variables = [str(os.environ.get(name)) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")]
    notes = [str(os.getpid()), *variables, str(begun), str(time.monotonic())]
    row = {"batch": batch, "tokens_per_second": 10.0, "notes": notes, "failed": False}
    out.mkdir()
    (out / "train.json").write_text(json.dumps([WHERE | row | {"out_of_memory": batch == OUT_OF_MEMORY}]))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[sys.argv.index("--out") + 1]))
