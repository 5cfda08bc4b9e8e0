# SPDX-License-Identifier: Apache-2.0
"""Memory of every rank while `liger train --shard fsdp2` loads a checkpoint: docs/images/sharded-loading.png and sharded-loading-gpus.png.

    python docs/generate/sharded_loading.py measure NAME RANKS FOLDER TEXT [random|tp]

prepares a run with the model in FOLDER, with random weights, or sharded by tensor parallelism, up to its first step, and adds a series NAME to the results: what each rank holds besides mapped files, in MiB, several
times a second, and what is used of its GPU, if there are GPUs. Without arguments, it draws the pictures from the committed results.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Results → the picture of them.
PICTURES = {
    RESULTS / "2026-11-27-cpu-sharded-loading" / "memory.json": "sharded-loading.png",
    RESULTS / "2026-11-28-two-h200s" / "loading.json": "sharded-loading-gpus.png",
}
ON_GPUS = shutil.which("nvidia-smi") is not None


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
    options = {"checkpoint": "none", "liger": "none", "steps": 1, "data": text}
    options |= {"device": "cuda", "precision": "bf16"} if ON_GPUS else {"device": "cpu", "precision": "fp32"}
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
        for number, used in enumerate(_used_of_gpus()[:ranks]):
            series.setdefault(f"GPU {number}", []).append([round(time.monotonic() - start, 1), used])
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit(process.returncode)
    return dict(sorted(series.items()))


def _used_of_gpus() -> list[int]:
    """Return the MiB that are used of each GPU."""
    if not ON_GPUS:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def draw(results: dict[str, dict[str, list[list[float]]]], picture: str) -> None:
    rows = 1 if len(results) < 4 else 2
    figure = Figure((11, 2.75 * rows), layout="constrained")
    panels = figure.subplots(rows, -(-len(results) // rows), sharey=True).flat
    for axes, (name, series) in zip(panels, results.items(), strict=True):
        for rank, points in series.items():
            label = rank if rank.startswith("GPU") else f"rank {rank}"
            axes.plot([seconds for seconds, _ in points], [size / 1024 for _, size in points], label=label)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("GiB" if "GPU 0" in next(iter(results.values())) else "host memory of a rank, GiB")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(ROOT / "docs" / "images" / picture, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:])
    cpu, gpus = PICTURES
    path = gpus if ON_GPUS else cpu
    if sys.argv[1:2] == ["measure"]:
        name, ranks, model, text, how = [*sys.argv[2:], "loaded"][:5]
        known = json.loads(path.read_text()) if path.exists() else {}
        known[name] = measure(int(ranks), model, text, how)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known) + "\n")
    else:
        for results, picture in PICTURES.items():
            draw(json.loads(results.read_text()), picture)
