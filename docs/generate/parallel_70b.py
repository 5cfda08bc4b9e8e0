# SPDX-License-Identifier: Apache-2.0
"""70B on paper: `nox -s paper` predicts what 8 to 64 GPUs of 80 GB take, by tensor parallelism × FSDP2, and writes docs/parallel-70b.md.

It needs neither a GPU nor a network. It keeps what it has found in .sweep/parallel-70b.json, and resumes when it is started again.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from fits import GIB, ROOT, folder

from liger_bench import markdown
from liger_hf.presets import PRESETS
from liger_train.implementations import PEER
from liger_train.plan.chart import picture
from liger_train.plan.estimate import Rates, estimate, seconds_of
from liger_train.plan.fit import CARDS
from liger_train.plan.step import Prediction, predict
from liger_train.plan.traffic import exchanges
from liger_train.row import SETUP, setup_from
from liger_train.setup import Setup

PAGE = ROOT / "docs" / "parallel-70b.md"
PICTURE = ROOT / "docs" / "images" / "parallel-70b.png"
RESULTS = ROOT / ".sweep" / "parallel-70b.json"
CHECKS = RESULTS.with_name("parallel-70b-checks.json")
# Matmuls and memory as `liger bench` measured them on an H200; links by NCCL on two H200s; the others are assumptions, and the page says so.
RATES = Rates(matmul=750e12, memory=4.2e12, attention=375e12, links=240e9, hosts=45e9)
MODEL = "meta-llama/Llama-3.1-70B"
SEQUENCE = 8192
GPUS, TENSOR = (8, 16, 32, 64), (1, 2, 4, 8)
STRATEGIES = {"none": "Transformers", "all": "Liger"}
LARGEST = 8
PREDICTED = ("peak_bytes", "held", "static_bytes", "parameters", "doing")
# GPUs and batch of the picture.
DRAWN = 64, 4


Rows = dict[tuple[int, int, str], dict[str, Any]]


def by_setup(rows: Iterable[dict[str, Any]]) -> Rows:
    """GPUs, tensor parallelism, strategy → the last of its rows."""
    return {(row["gpus"], row["tp"], row["liger"]): row for row in rows}


def setup_of(gpus: int, tp: int, liger: str, batch: int) -> Setup:
    shard = "none" if gpus == tp else "fsdp2"
    return Setup(str(folder(MODEL)), batch, SEQUENCE, liger=liger, shard=shard, ranks=gpus, tp=tp)


def predictions() -> Iterator[dict[str, Any]]:
    """Of every number of GPUs × tensor parallelism × strategy: batches of 1, 2, 4, 8 sequences, as long as they fit."""
    RESULTS.parent.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {tuple(row[name] for name in ("gpus", "tp", "liger", "batch")): row for row in rows}
    for gpus, tp, liger in product(GPUS, TENSOR, STRATEGIES):
        batch = 1
        while batch <= LARGEST:
            row = known.get((gpus, tp, liger, batch))
            if row is None:
                found = predict(setup_of(gpus, tp, liger, batch))
                row = {"gpus": gpus, "tp": tp, "liger": liger, "batch": batch}
                row |= {name: getattr(found, name) for name in PREDICTED}
                rows.append(row)
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
                print(gpus, tp, liger, batch, f"{row['peak_bytes'] / GIB:.1f} GiB", flush=True)
            yield row
            if row["peak_bytes"] > CARDS[80] * GIB:
                break
            batch *= 2


def timed(rows: Iterable[dict[str, Any]]) -> Rows:
    """GPUs, tensor parallelism, strategy → the row of the largest batch that fits, with seconds of a step and tokens per second and GPU."""
    best = by_setup(row for row in rows if row["peak_bytes"] <= CARDS[80] * GIB)
    for row in best.values():
        found = estimate(setup_of(row["gpus"], row["tp"], row["liger"], row["batch"]), RATES, row["parameters"])
        row["seconds"], row["links"] = found.seconds, found.sharding > found.operations + found.tensor
        row["speed"] = row["batch"] * SEQUENCE / row["tp"] / found.seconds
    return best


def drawn(rows: Iterable[dict[str, Any]]) -> None:
    """The memory of DRAWN, by tensor parallelism and strategy."""
    gpus, batch = DRAWN
    found = by_setup(row for row in rows if row["batch"] == batch)
    bars = []
    for tp, liger in product(TENSOR, STRATEGIES):
        if row := found.get((gpus, tp, liger)):
            memory = (row["peak_bytes"], row["held"], row["doing"], 0, 0, 0)
            bars.append((f"tp {tp}, {STRATEGIES[liger]}", Prediction(setup_of(gpus, tp, liger, batch), *memory)))
    title = f"Llama 70B on {gpus} GPUs, {batch} × {SEQUENCE:,} tokens per group of tp GPUs"
    picture(bars, CARDS[80] * GIB, PICTURE, title)


def checks() -> list[dict[str, Any]]:
    """Every committed row of a preset with a time, but for those of a peer, beside its estimate. `--checkpoint auto` has no step that is like the others."""
    done = {row["key"]: row for row in (json.loads(CHECKS.read_text()) if CHECKS.exists() else [])}
    for path in sorted(ROOT.glob("benchmarks/results/*/train.json")):
        for row in json.loads(path.read_text()):
            key = f"{path.parent.name} {json.dumps([row[name] for name in SETUP if name in row])}"
            is_timed = row["step_seconds"] and row["checkpoint"] != "auto" and row["device"] == "cuda"
            if key in done or not is_timed or row["model"] not in PRESETS or row["liger"] == PEER:
                continue
            setup = setup_from(row)
            error = estimate(setup, RATES, row["trainable_parameters"]).seconds / row["step_seconds"] - 1
            same = {name: row[name] for name in ("optimizer", "offload", "adapter")}
            plain = same == {"optimizer": "adamw", "offload": "none", "adapter": "none"} and row["liger"] in STRATEGIES
            done[key] = {"key": key, "model": row["model"], "host": row["offload"] != "none"}
            done[key] |= {"plain": plain, "liger": row["liger"], "error": error}
            CHECKS.write_text(json.dumps(list(done.values()), indent=1) + "\n")
            print(f"{error:+.0%}", key, flush=True)
    return list(done.values())


def page(rows: list[dict[str, Any]], best: Rows, checked: list[dict[str, Any]]) -> str:
    first = by_setup(row for row in rows if row["batch"] == 1)
    fastest = {
        (gpus, liger): max((row["speed"] for key, row in best.items() if key[::2] == (gpus, liger)), default=None)
        for gpus, liger in product(GPUS, STRATEGIES)
    }
    ratios = []
    for gpus in GPUS:
        speeds = [fastest[gpus, liger] for liger in STRATEGIES]
        words = ["does not fit" if speed is None else f"{speed:,.0f}" for speed in speeds]
        ratios.append([str(gpus), *words, "–" if None in speeds else f"{speeds[1] / speeds[0]:.2f}"])
    pairs = [[best.get((gpus, tp, liger)) for liger in STRATEGIES] for gpus, tp in product(GPUS, TENSOR)]
    same = [liger["speed"] / plain["speed"] for plain, liger in pairs if plain and liger]
    return TEXT.format(
        memory=_table(_both(first, lambda row: f"{row['peak_bytes'] / GIB:.1f}")),
        batches=_table(_both(best, lambda row: str(row["batch"]))),
        speeds=_table(_both(best, lambda row: f"{row['speed']:,.0f}")),
        exchanged=_table(lambda gpus, tp: traffic(gpus, tp, rows[0]["parameters"])),
        limits=_table(_both(first, _limit), right=()),
        ratios=markdown.table(["GPUs", *STRATEGIES.values(), "÷"], ratios, right=range(1, 4)),
        errors=markdown.table(["rows", "number", "median error", "from", "to"], _errors(checked), right=range(1, 5)),
        sequence=f"{SEQUENCE:,}", limit=f"{CARDS[80]:.0f}", largest=LARGEST,
        matmul=f"{RATES.matmul / 1e12:.0f}", bandwidth=f"{RATES.memory / 1e12:.1f}", attention=f"{RATES.attention / 1e12:.0f}",
        links=f"{RATES.links / 1e9:.0f}", hosts=f"{RATES.hosts / 1e9:.0f}", per_host=RATES.per_host,
        low=f"{min(same):.2f}" if same else "–", high=f"{max(same):.2f}" if same else "–",
    )  # fmt: skip


def _table(cell: Callable[[int, int], str], right: Sequence[int] = range(1, 5)) -> str:
    """A table with a cell for each number of GPUs and tensor parallelism."""
    rows = [[str(gpus), *(cell(gpus, tp) for tp in TENSOR)] for gpus in GPUS]
    return markdown.table(["GPUs", *(f"tp {tp}" for tp in TENSOR)], rows, right=right)


def traffic(gpus: int, tp: int, parameters: int) -> str:
    """GB that a GPU receives within its host and over the network, and seconds of all exchanges, with one sequence."""
    found = exchanges(setup_of(gpus, tp, "all", 1), parameters, parameters)
    within, network = (sum(each.received(RATES.per_host)[index] for each in found) / 1e9 for index in (0, 1))
    return f"{within:,.0f} + {network:,.1f}; {sum(seconds_of(each, RATES) for each in found):.1f} s"


def _both(found: Rows, words: Callable[[dict[str, Any]], str]) -> Callable[[int, int], str]:
    """Cells with a figure of each strategy."""
    return lambda gpus, tp: " / ".join(
        words(row) if (row := found.get((gpus, tp, liger))) else "–" for liger in STRATEGIES
    )


def _limit(row: dict[str, Any]) -> str:
    """The category with the most memory at the peak besides what stays between steps, or that this alone does not fit."""
    if row["static_bytes"] > CARDS[80] * GIB:
        return "weights and optimizer"
    changing = {name: size for name, size in row["held"].items() if name not in ("weights", "optimizer")}
    return max(changing, key=lambda name: changing[name])


def _errors(checked: list[dict[str, Any]]) -> list[list[str]]:
    groups = {
        "AdamW, nothing offloaded, Transformers": [r for r in checked if r["plain"] and r["liger"] == "none"],
        "AdamW, nothing offloaded, Liger": [r for r in checked if r["plain"] and r["liger"] == "all"],
        "other optimizers, adapters and strategies": [r for r in checked if not r["plain"] and not r["host"]],
        "offloaded to the host": [r for r in checked if r["host"]],
    }
    return [
        [name, str(len(found)), *(f"{value:+.0%}" for value in (statistics.median(errors), min(errors), max(errors)))]
        for name, found in groups.items()
        if (errors := [row["error"] for row in found])
    ]


TEXT = """# 70B on paper

<!-- Generated by `nox -s paper`; do not edit. -->

Predicted memory and speed of training Llama 70B on 8 to 64 GPUs of 80 GB, with and without Liger. Tensor parallelism (`tp`) shards each layer, and FSDP2
uses the other ranks. **Nothing on this page was measured on such machines.** `liger plan` predicts the memory ([accuracy](plan-accuracy.md)). Times are
estimates from rates; [their error](#how-far-to-trust-the-times) is below.

* Setup: weights and AdamW in float32, matmuls in bfloat16 (`--precision bf16`), all layers recomputed (`--checkpoint full`), {sequence} tokens per sequence.
* A batch belongs to a group of `tp` GPUs.
* Of 80 GB, {limit} GiB can be allocated.
* Each cell: Transformers / Liger.

## Peak memory with one sequence, GiB

{memory}

Under FSDP2 the logits do not shrink with the number of GPUs, and all other categories do. The largest category at the peak, besides weights and optimizer
state:

{limits}

![Llama 70B on 64 GPUs: predicted memory of a rank](images/parallel-70b.png)

## The largest batch that fits

Tested with 1, 2, 4 and 8 sequences; {largest} means {largest} or more.

{batches}

## Estimated tokens per second and GPU, at that batch

{speeds}

The best `tp` for each number of GPUs:

{ratios}

## Bytes that a GPU receives per step

By a formula, in GB: within its host + over the network; the seconds of all collectives at the rates below. One sequence, Liger. Tests count the same bytes in
the collectives of small runs.

{exchanged}

## Where a factor of three would come from

LinkedIn reported that Liger Kernel cut the end-to-end training time of a 70B model to a third, without naming the setup. In these estimates, Liger has
{low} to {high} times the throughput if both fit, each at its largest batch. It saves passes over memory in every step, and allows larger batches. Larger
batches matter if the links between hosts are the bottleneck, because FSDP2 moves the same bytes for one sequence as for eight. The matmuls do not change.

Liger's ops therefore do not give a factor of three on these GPUs. That needs a setup that offloads, or whose logits keep the batch so small that it waits
for its links.

## How far to trust the times

The estimate sums all operations of a step on fake tensors. Each takes the longer of its matmul time and its memory time. The estimate ignores gaps between
kernels, the host, and waiting for other ranks. Its error on the committed runs of Liger and Transformers (`benchmarks/results`) is estimated ÷ measured − 1:

{errors}

Estimates are typically a fifth too fast for both, so ratios are more accurate than times. Offloaded runs wait for the host, which the estimate ignores.

| rate | value | from |
| --- | ---: | --- |
| matmul in bfloat16 | {matmul} TFLOP/s | measured by `liger bench` on one H200 |
| memory, read and written | {bandwidth} TB/s | measured by `liger bench` on one H200; an H100 has less |
| attention | {attention} TFLOP/s | assumption: half of the rate of a matmul |
| received by a GPU within a host of {per_host} GPUs | {links} GB/s | measured on two H200s by NCCL (256 MiB: all-gather 242, reduce-scatter 229, all-reduce 301) |
| received by a GPU from other hosts | {hosts} GB/s | assumption: one 400 Gbit/s adapter for each GPU |

FSDP2 gathers weights in 16 bits for both passes, and sums gradients in 32 bits. Each host receives the shards of the others once, over all its adapters. FSDP2
does so while layers compute, and the longer time counts. The all-reduces of tensor parallelism and the logits that Transformers gathers do not overlap with anything, and are added.

Plan your own setup:

<!-- not run: tests/plan has plans like this one -->

```bash
liger plan --model llama-3-8b --batch 2 --sequence 8192 --shard fsdp2 --tp 2 --ranks 8 --memory-limit 78GiB --no-techniques
```
"""


if __name__ == "__main__":
    found = list(predictions())
    drawn(found)
    PAGE.write_text(page(found, timed(found), checks()))
