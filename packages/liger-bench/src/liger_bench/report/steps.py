# SPDX-License-Identifier: Apache-2.0
"""The part of a report on training steps: a table beside the arithmetic limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from liger_bench import markdown
from liger_bench.records import Record
from liger_bench.step.cases import HF, LIGER, LIGER_KERNEL
from liger_bench.step.table import HEAD, cells, title

PICTURE = "steps"
NAMES = {HF: "Transformers", LIGER_KERNEL: "liger-kernel", LIGER: "Liger"}
ABOUT = """
Forward and backward of the steps that users train with, from random weights and tokens; the implementations alternate,
each in processes of its own. The *limit* is the time of the arithmetic (matmuls and attention) at the rate of a large
matmul, which is measured in the same processes; where layers are checkpointed, it includes the second forward pass.
Peak memory is that of the allocator.
""".strip()


def steps_section(rows: Sequence[Record], pictures: dict[str, Path]) -> str:
    """Empty without rows."""
    if not rows:
        return ""
    table = [
        (
            title(row),
            f"**{NAMES[LIGER]}**" if row["implementation"] == LIGER else NAMES[row["implementation"]],
            *cells(row, rows),
        )
        for row in rows
    ]
    head = ("step, batch × sequence", "implementation", *HEAD)
    known = [row for row in rows if row["product_flops_per_second"]]
    peaks = ""
    if known:
        rates = [row["product_flops_per_second"] / 1e12 for row in known]
        copies = [row["copy_bytes_per_second"] / 1e12 for row in known]
        peaks = (
            f"Measured peaks: matmul {min(rates):.0f}–{max(rates):.0f} TFLOP/s, copy "
            f"{min(copies):.3g}–{max(copies):.3g} TB/s."
        )
    picture = (
        f"![Training steps: share of the arithmetic limit]({pictures[PICTURE].as_posix()})"
        if PICTURE in pictures
        else ""
    )
    reasons = markdown.reasons((f"{title(row)} {NAMES[row['implementation']]}", row["reason"]) for row in rows)
    parts = [
        "## Training steps",
        ABOUT,
        picture,
        markdown.table(head, markdown.sparse(table), right=range(2, len(head))),
        peaks,
        reasons,
    ]
    return "\n\n".join(part for part in parts if part)
