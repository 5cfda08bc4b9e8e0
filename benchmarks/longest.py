# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that fits a 24-GB card: Transformers and PEFT alone, with liger-kernel, and with Liger.

    python benchmarks/longest.py --setup qlora --memory-limit 23GiB --out benchmarks/results/steps

It searches among runs of `liger train` on one sequence. Their rows, also of those out of memory, are appended to
train.json. The search starts at the length that `liger plan` predicts. A second start continues with the rows of the
same machine, versions and commit. Each setup and implementation has its own process, because liger-kernel patches
modules.
"""

import argparse
import math
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from pairs import measure_each

from liger_bench import machine
from liger_bench.measurements import Files, rows_as
from liger_bench.memory import bytes_of
from liger_train.errors import SetupError
from liger_train.implementations import IMPLEMENTATIONS, PEER
from liger_train.plan.search import fast_peak, largest
from liger_train.row import COLUMNS, Row
from liger_train.runs.run import run
from liger_train.setup import DEFAULTS, Setup

SETUPS: dict[str, dict[str, Any]] = {
    "qlora": {"model": "llama-3-8b", "adapter": "qlora"},
    "lora": {"model": "llama-3-8b", "adapter": "lora"},
    "full": {"model": "llama-3.2-1b"},
    "tiny": {"model": "tiny"},
}
COMPARED = ("hf", PEER, "liger")
# A length is a multiple of UNIT.
UNIT, LONGEST = 1024, 1 << 18
# The second step has the state of the optimizer.
STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="append", choices=SETUPS, help="repeatable; all but tiny by default")
    parser.add_argument("--implementation", action="append", choices=COMPARED, help="repeatable; all by default")
    parser.add_argument("--memory-limit", default="23GiB", help="memory that the allocator may take")
    parser.add_argument("--longest", type=int, default=LONGEST, help="the longest sequence to try")
    parser.add_argument("--out", type=Path, default=Path("results/steps"))
    measure_each(parser, _pairs, measure)


def _pairs(args: argparse.Namespace) -> Iterable[tuple[str, str]]:
    return product(args.setup or [name for name in SETUPS if name != "tiny"], args.implementation or COMPARED)


def measure(args: argparse.Namespace, name: str, implementation: str) -> None:
    """Search the longest sequence of one pair, and append the row of each run."""
    device, files = machine.measurable_device("longest", "auto"), Files("train", COLUMNS, args.out)
    files.check()
    limit = bytes_of("--memory-limit", args.memory_limit, SetupError)
    options = DEFAULTS[device.type] | SETUPS[name] | IMPLEMENTATIONS[implementation]
    # Memory of the CPU cannot be limited, but its peak is measured.
    limited = limit if device.type == "cuda" else None
    setup = Setup(**options, device=device.type, memory_limit=limited, steps=STEPS)

    def size(count: int) -> float:
        trial = replace(setup, sequence=count * UNIT)
        row = known(trial, files, machine.describe(device))
        if row is None:
            row = run(trial)
            files.append([row.columns()])
        if row.failed:
            sys.exit(f"{name}, {implementation}: {row.reason}")
        print(
            f"{name}, {implementation}: {trial.sequence}", "out of memory" if row.out_of_memory else "fits", flush=True
        )
        return math.inf if row.out_of_memory else row.peak_bytes or 0

    most = args.longest // UNIT
    longest = largest(size, limit, most, predicted(setup, limit, most)) * UNIT
    print(f"{name}, {implementation}: longest {longest}", flush=True)


def predicted(setup: Setup, limit: int, most: int) -> int:
    """Return the longest sequence by `liger plan` in units, at least 2; with liger-kernel that of Liger."""
    if setup.liger == PEER:
        setup = replace(setup, **IMPLEMENTATIONS["liger"])
    peak = fast_peak(setup)
    return max(2, largest(lambda count: peak(replace(setup, sequence=count * UNIT)), limit, most)) if peak else 2


def known(setup: Setup, files: Files, where: dict[str, str]) -> Row | None:
    """Return the row of a setup that was measured before."""
    same = {each.name: getattr(setup, each.name) for each in fields(Setup)}
    same |= {name: where[name] for name in machine.ENVIRONMENT}
    rows = rows_as(Row, files.read())
    return next((row for row in rows if all(getattr(row, name) == value for name, value in same.items())), None)


if __name__ == "__main__":
    main()
