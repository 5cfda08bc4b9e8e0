# SPDX-License-Identifier: Apache-2.0
"""The VRAM table: `python docs/generate/vram.py` predicts, by `liger plan`, every model × way to train that docs/vram.json lacks.

It needs neither a GPU nor a network: the models are the presets, whose configs are in liger_hf. Interrupted, it goes on where it stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from liger_hf.presets import LARGE

DOCS = Path(__file__).parents[1]
RESULTS = "vram.json"
SEQUENCE = 2048
GIB = 2**30
# GB of a card as it is sold → GiB that PyTorch can allocate on it: without half a GiB for CUDA, and at 48 GB without what error correction takes.
CARDS = {24: 23.0, 48: 44.0, 80: 78.0, 141: 139.0}
WAYS = {
    "full": ["--precision", "bf16"],
    "full, bf16 weights": ["--precision", "bf16-pure"],
    "LoRA": ["--precision", "bf16", "--adapter", "lora"],
    "QLoRA": ["--precision", "bf16", "--adapter", "qlora"],
}


def main() -> None:
    path = DOCS / RESULTS
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    known = {(row["model"], row["way"]) for row in rows}
    for model in LARGE:
        for way, options in WAYS.items():
            if (model, way) not in known:
                rows.append({"model": model, "way": way, **_predicted(model, options)})
                path.write_text(json.dumps(rows, indent=1) + "\n")
                print(model, way, f"{rows[-1]['peak_bytes'] / GIB:.1f} GiB", flush=True)


def _predicted(model: str, options: list[str]) -> dict[str, Any]:
    command = ["plan", "--model", model, "--batch", "1", "--sequence", str(SEQUENCE), *options, "--no-techniques", "--json"]
    done = subprocess.run([sys.executable, "-m", "liger_core", *command], capture_output=True, text=True, check=True)
    prediction = json.loads(done.stdout)["prediction"]
    return {"peak_bytes": prediction["peak_bytes"], "parameters": prediction["parameters"], "command": " ".join(["liger", *command[:-2]])}


def page() -> str:
    rows = json.loads((DOCS / RESULTS).read_text())
    found = {(row["model"], row["way"]): row for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [f"| model | parameters | {' | '.join(WAYS)} |", "| --- | ---: |" + " ---: |" * len(WAYS)]
    for model in models:
        peaks = [found.get((model, way)) for way in WAYS]
        parameters = next(row["parameters"] for row in peaks if row)
        lines.append(f"| {model} | {parameters / 1e9:.2f} B | " + " | ".join(_cell(row) for row in peaks) + " |")
    return f"""# VRAM table

Predicted peak memory of one training step with Liger on one GPU: 1 sequence of {SEQUENCE:,} tokens, AdamW, activation checkpointing, no offloading. Beside it,
the smallest card of {", ".join(map(str, CARDS))} GB that it fits on.

{chr(10).join(lines)}

* *full*: weights, gradients and moments in float32, matmuls in bfloat16 (`--precision bf16`). *bf16 weights*: all of them in bfloat16
  (`--precision bf16-pure`).
* *LoRA* has rank 16; *QLoRA* also stores the weights in 4 bits.
* More sequences need more. For your batch, sequence length, sharding and offloading, run `liger plan`, which also finds a setup that fits:

```bash
{rows[0]["command"]}
```

The figures are predictions of `liger plan` ([how accurate they are](planning.md#accuracy)), made without a GPU by `docs/generate/vram.py`. The models are the
presets of `liger plan`; any other model on the hub works the same way: `liger plan --model Qwen/Qwen3-8B`.
"""


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    peak = row["peak_bytes"] / GIB
    card = next((f"{size} GB" for size, usable in CARDS.items() if peak <= usable), "several GPUs")
    return f"{peak:.1f} GiB, {card}"


if __name__ == "__main__":
    main()
