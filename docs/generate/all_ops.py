# SPDX-License-Identifier: Apache-2.0
"""Every op beside the other libraries: `python docs/generate/all_ops.py` writes docs/benchmarks/ops.md.

The rows are those of the newest folder *-all-ops of benchmarks/results; `nox -s benchmarks` measures them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import peer_operators

from liger_bench import markdown
from liger_bench.op_page import how_measured, ops_section
from liger_bench.records import Records, read
from liger_core.builtin import CATALOGUE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks" / "ops.md"
OPS = tuple(op.name for op in CATALOGUE)


def newest(name: str) -> Path:
    """Return the newest folder of results with this name after its date."""
    return sorted(RESULTS.glob(f"*-{name}"))[-1]


def records(folder: Path) -> Records:
    """Return the rows of a folder, with the ops in the order of the catalogue."""
    found = read(folder)
    assert found is not None, f"{folder} has no rows"
    order = {name: index for index, name in enumerate(OPS)}
    return replace(found, ops=sorted(found.ops, key=lambda row: order.get(row["op"], len(order))))


def page(ops: Sequence[str] = OPS) -> str:
    folder = newest("all-ops")
    found = records(folder)
    rows = [row for row in found.ops if row["op"] in ops]
    unmeasured = [op for op in ops if op not in {row["op"] for row in rows}]
    parts = [
        "# Ops",
        markdown.generated("python docs/generate/all_ops.py"),
        markdown.where(rows)[0] + " [Versions and commit](#how-it-was-measured) are below.",
        ops_section(rows, {}),
        f"Not measured: {peer_operators.links(unmeasured)}." if unmeasured else "",
        "## The functions of liger-kernel",
        peer_operators.section(),
        how_measured(found),
        REPEAT.format(folder=folder.relative_to(ROOT)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


REPEAT = """
## How to repeat

    nox -s benchmarks -- {folder}
    python docs/generate/all_ops.py

Ratios within a run can be compared, times of different runs cannot.
""".strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
