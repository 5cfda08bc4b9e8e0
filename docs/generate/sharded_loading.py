# SPDX-License-Identifier: Apache-2.0
"""Host memory of every rank while `liger train --shard fsdp2` loads a checkpoint: docs/images/sharded-loading.png.

    python docs/generate/sharded_loading.py measure NAME RANKS FOLDER TEXT [random|tp]

prepares a run on the CPU with the model in FOLDER, with random weights, or sharded by tensor parallelism, up to its first step, and adds a series NAME to the committed results: what each rank holds besides mapped
files, in MiB, several times a second. Without arguments, it draws the picture from them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-27-cpu-sharded-loading" / "memory.json"
PICTURE = ROOT / "docs" / "images" / "sharded-loading.png"


def work(model: str, text: str, how: str) -> None:
    """One rank, which ends where its first step would begin."""
    import torch.distributed as dist
    from transformers import TrainerCallback

    from liger_train.runs.run import run
    from liger_train.setup import Setup

    class Stop(TrainerCallback):
        def on_step_begin(self, *args: object, **options: object) -> None:
            dist.barrier()
            os._exit(0)

    ranks = int(os.environ["WORLD_SIZE"])
    options = {"precision": "fp32", "checkpoint": "none", "liger": "none", "device": "cpu", "steps": 1, "data": text}
    options |= {"tp": ranks} if how == "tp" else {"shard": "fsdp2"}
    setup = Setup(model, batch=1, sequence=16, ranks=ranks, random_weights=how == "random", **options)
    row = run(setup, observers=[Stop()])
    raise SystemExit(row.reason)


def measure(ranks: int, model: str, text: str, how: str) -> dict[str, list[list[float]]]:
    """Rank → [seconds, MiB]."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    start = time.monotonic()
    process = subprocess.Popen([*launcher, __file__, "work", model, text, how])
    names: dict[Path, str] = {}
    series: dict[str, list[list[float]]] = {}
    while process.poll() is None:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) != process.pid:
                    continue
                if folder not in names:
                    names[folder] = re.search(r"\0LOCAL_RANK=(\d+)", (folder / "environ").read_text())[1]
                held = re.findall(r"(?:RssAnon|RssShmem):\s+(\d+) kB", (folder / "status").read_text())
            except (OSError, TypeError):
                continue
            point = [round(time.monotonic() - start, 1), sum(map(int, held)) // 1024]
            series.setdefault(names[folder], []).append(point)
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit(process.returncode)
    return dict(sorted(series.items()))


def draw(results: dict[str, dict[str, list[list[float]]]]) -> None:
    figure, grid = plt.subplots(2, -(-len(results) // 2), figsize=(11, 5.5), sharey=True, layout="constrained")
    panels = grid.flat
    for axes, (name, series) in zip(panels, results.items(), strict=True):
        for rank, points in series.items():
            axes.plot([seconds for seconds, _ in points], [size / 1024 for _, size in points], label=f"rank {rank}")
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("host memory of a rank, GiB")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:])
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if sys.argv[1:2] == ["measure"]:
        name, ranks, model, text, how = [*sys.argv[2:], "loaded"][:5]
        known[name] = measure(int(ranks), model, text, how)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(known) + "\n")
    else:
        draw(known)
