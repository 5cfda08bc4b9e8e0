# SPDX-License-Identifier: Apache-2.0
"""The data of the page that answers whether a setup fits: `nox -s fits` plans every model of models.toml, with `liger plan`'s peaks.

It needs neither a GPU nor a network. It writes fits.json after each combination, and resumes when it is started again. Arguments
select models. It also writes the VRAM table, docs/vram.md, from the same data. `--check 200` plans as many random setups of whole
models, minutes each for the largest, and writes fits_checked.json, with which a test compares the data.
"""

import json
import random
import statistics
import sys
import tomllib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from liger_bench import markdown
from liger_hf.presets import PRESETS
from liger_train.plan import fit
from liger_train.plan.estimate import work
from liger_train.plan.fit import CARDS, EXAMPLES, curve, setups
from liger_train.row import setup_from
from liger_train.setup import Setup

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "vram.md"
RESULTS = ROOT / "benchmarks" / "results"
DATA = Path(__file__).with_name("fits.json")
CHECKED = Path(__file__).with_name("fits_checked.json")
MODELS = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
SPEED = Path(fit.__file__).parent / "page" / "speed.json"
GIB = 2**30
# Those of the VRAM table.
SHOWN = (24, 80)
# In the order in which they are planned.
TABLE = {"qlora": "QLoRA", "lora": "LoRA", "bf16": "bf16"}
SEQUENCE, MOST = 2048, 1 << 20


def main(words: list[str]) -> None:
    models = read()
    SPEED.write_text(json.dumps(speed(), indent=1) + "\n")
    chosen = [model for model in MODELS if not words or any(word in model for word in words)]
    plans = {model: dict(setups(Setup(str(folder(model))))) for model in chosen}
    # All models first have what the VRAM table shows.
    for name in dict.fromkeys(name for each in plans.values() for name in each):
        for model in chosen:
            curves = models.setdefault(model, {})
            if name in curves or name not in plans[model]:
                continue
            curves[name] = curve(plans[model][name])
            check_size(model, name, curves[name]["parameters"])
            DATA.write_text(_lines(models))
            print(model, name, flush=True)
        if not words and name.startswith("bf16"):
            # By now, all methods of the table are planned.
            PAGE.write_text(page())


def check(count: int) -> None:
    """Plan whole models at random points of what is known, up to this many in all."""
    from liger_train.plan.step import predict

    models, points = read(), json.loads(CHECKED.read_text()) if CHECKED.exists() else []
    draw = random.Random(0)
    while len(points) < count:
        model = draw.choice([*models])
        name, optimizer = draw.choice([*models[model]]), draw.choice(["adamw", "adamw-8bit"])
        batch, sequence = draw.choice([1, 2, 3, 4, 8, 16]), round(2 ** draw.uniform(8, 13))
        ranks = draw.choice([2, 4, 8]) if name.endswith("fsdp2") else 1
        point = {"model": model, "name": name, "call": [batch, sequence, ranks], "optimizer": optimizer}
        if any(point.items() <= known.items() for known in points):
            continue
        setup = dict(setups(Setup(str(folder(model)))))[name]
        found = predict(replace(setup, batch=batch, sequence=sequence, ranks=ranks, optimizer=optimizer))
        points.append(point | {"peak_bytes": found.peak_bytes})
        CHECKED.write_text("[\n" + ",\n".join(map(json.dumps, points)) + "\n]\n")
        print(points[-1], flush=True)


def speed() -> dict[str, Any]:
    """Return the share of the peak of matmuls that measured runs reach, and how far the speed that it gives is off."""
    shares: dict[str, list[float]] = {"all": [], "none": []}
    rows = list(measured())
    for setup, tokens_per_second in rows:
        per_token, per_square = work(setup)
        operations = tokens_per_second / setup.ranks * (per_token + per_square * setup.sequence)
        shares[setup.liger].append(operations / EXAMPLES[141][1])
    share = {liger: statistics.median(reached) for liger, reached in shares.items()}
    errors = [abs(share[liger] / each - 1) for liger, reached in shares.items() for each in reached]
    return {
        "shares": {liger: round(each, 3) for liger, each in share.items()},
        "rows": len(rows),
        "tokens": min(setup.batch * setup.sequence for setup, _ in rows),
        "median_error": round(statistics.median(errors), 3),
        "largest_error": round(max(errors), 3),
    }


def measured() -> Iterator[tuple[Setup, float]]:
    """Yield the setups of the page among the committed runs that had an H200 to themselves, and their tokens per second."""
    for run in ("2026-11-21-h200-training-runs", "2026-11-28-two-h200s"):
        for row in json.loads((RESULTS / run / "train.json").read_text()):
            setup = setup_from(row)
            known = setup.checkpoint in ("full", "none") and setup.liger in ("all", "none") and setup.offload == "none"
            data_parallel = setup.cp == setup.tp == 1 and (setup.ranks == 1) == (setup.shard == "none")
            if known and data_parallel and setup.model in PRESETS and row["tokens_per_second"]:
                yield setup, row["tokens_per_second"]
    for row in json.loads((RESULTS / "2026-11-23-h200-steps" / "step.json").read_text()):
        if liger := {"hf": "none", "liger": "all"}.get(row["implementation"]):
            setup = Setup("llama-3-8b", row["batch"], row["sequence"], liger=liger, adapter="lora")
            yield setup, row["tokens_per_second"]


def read() -> dict[str, dict[str, Any]]:
    """Return the combinations of each model, in the order of models.toml."""
    known: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    return {model: known[model] for model in MODELS if model in known}


def check_size(model: str, name: str, parameters: int) -> None:
    """Compare the number of parameters with the published one; an adapter has parameters of its own."""
    billions = MODELS[model]["billions"]
    if name.startswith(("bf16", "full")) and abs(parameters / billions / 1e9 - 1) > 0.005:
        raise ValueError(f"{model}: models.toml must have its config, got one of {parameters:,} parameters")


def folder(model: str) -> Path:
    """Return a folder with the config, as on the hub."""
    from transformers import AutoConfig

    path = ROOT / ".sweep" / "configs" / model
    tokens = {"bos_token_id": None, "eos_token_id": None}
    AutoConfig.for_model(MODELS[model]["model_type"], **(tokens | MODELS[model]["config"])).save_pretrained(path)
    return path


def _lines(models: dict[str, dict[str, Any]]) -> str:
    """Write one combination in a line."""
    texts = []
    for model, curves in models.items():
        lines = [f' "{name}": {json.dumps(curve, separators=(",", ":"))}' for name, curve in curves.items()]
        texts.append(f'"{model}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(texts) + "\n}\n"


def page() -> str:
    """Return the VRAM table."""
    tables = "\n\n".join(f"## {size} GB\n\n{_table(CARDS[size] * GIB)}" for size in SHOWN)
    return f"""# VRAM table

{markdown.generated("nox -s fits")}

The longest sequence that trains at batch 1, and the largest batch of {SEQUENCE:,} tokens per sequence, on one GPU with Liger.
Activation checkpointing is on and the optimizer is AdamW. For other cards, optimizers and several GPUs, see [Will it fit?](fit.md).

{tables}

* *bf16* trains all weights, with weights, gradients and moments in bfloat16 (`--precision bf16-pure`).
* *LoRA* and *QLoRA* have rank 16 and adapt all linear layers and experts.
* *QLoRA* stores linear layers and [experts](how-to/moe.md#in-4-bits) in 4 bits. The other weights stay in 16 bits.
* *–*: not even 1 × 64 tokens fit. *1M+*: more than a million tokens fit, if the model can use them.

The figures are [predictions](planning.md#accuracy). For your setup, run `liger plan`, which also finds one that fits:

```bash
liger plan --model Qwen/Qwen3-8B --batch 4 --sequence {SEQUENCE} --adapter lora --memory-limit 24GiB --no-techniques
```
"""


def _table(room: float) -> str:
    from liger_train.plan.peaks import Peaks

    rows = []
    for model, curves in read().items():
        if not all(f"{method}/full/all/none" in curves for method in TABLE):
            continue
        planned = {method: Peaks.from_columns(curves[f"{method}/full/all/none"]) for method in TABLE}
        size = planned["bf16"].parameters
        cells = [_count(each, room, lambda n: (1, 64 * n), 64) for each in planned.values()]
        cells += [_count(each, room, lambda n: (n, SEQUENCE), 1) for each in planned.values()]
        rows.append((size, [model.partition("/")[2], f"{size / 1e9:.1f} B", *cells]))
    heads = [f"longest, {words}" for words in TABLE.values()] + [f"batch, {words}" for words in TABLE.values()]
    return markdown.table(("model", "size", *heads), [cells for _, cells in sorted(rows, key=lambda row: row[0])])


def _count(each: Any, room: float, call: Any, unit: int) -> str:
    def over(number: int) -> bool:
        return sum(each.held(*call(number)).values()) > room

    most = bisect_right(range(1, MOST // unit + 1), False, key=over)
    return "–" if not most else "1M+" if most * unit >= MOST else f"{most * unit:,}"


if __name__ == "__main__":
    check(int(sys.argv[2])) if sys.argv[1:2] == ["--check"] else main(sys.argv[1:])
