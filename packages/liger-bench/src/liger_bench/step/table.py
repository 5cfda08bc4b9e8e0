# SPDX-License-Identifier: Apache-2.0
"""The cells of a table of steps, on the terminal and on a page alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liger_bench.printing import speed_ratio
from liger_bench.step.cases import CASES, HF, LIGER_KERNEL
from liger_core.tables import Column

FIGURES = (
    Column("tokens/s", "median of the timed steps", number=True),
    Column("0.2 – 0.8", "quantiles of the same", number=True, detail=True),
    Column("÷ hf", "tokens/s ÷ those of Transformers alone", number=True),
    Column("÷ liger-kernel", number=True),
    Column(
        "share of limit",
        "time of the arithmetic at the measured rate of a large matmul, recomputation included, ÷ time",
        number=True,
    ),
    Column("limit tokens/s", number=True),
    Column("without recompute", "the limit of a step that recomputes nothing", number=True, detail=True),
    Column("peak GiB", "most memory held at once", number=True),
    Column("loss", "of the first step", number=True, detail=True),
)
HEAD = tuple(column.name for column in FIGURES)


def title(row: Mapping[str, Any]) -> str:
    """Return the title of a row: the case, the shape and whether it is checkpointed."""
    case = CASES[row["case"]]
    words = [case.words, f"{row['batch']} × {row['sequence']}", *(["checkpointed"] if case.recompute else [])]
    return ("tiny: " if row["tiny"] else "") + ", ".join(words)


def cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a cell for each column of HEAD; the row is compared with `rows`."""
    if row["tokens_per_second"] is None:
        return ["out of memory" if row["out_of_memory"] else "–", *["–"] * (len(HEAD) - 1)]
    tokens = row["batch"] * row["sequence"]
    return [
        f"{row['tokens_per_second']:,.0f}",
        f"{tokens / row['high_seconds']:,.0f} – {tokens / row['low_seconds']:,.0f}",
        *(speed_ratio(row, base, rows, title) for base in (HF, LIGER_KERNEL)),
        f"{row['share']:.2f}",
        f"{tokens / row['limit_seconds']:,.0f}",
        f"{tokens / row['limit_without_recompute_seconds']:,.0f}",
        f"{row['peak_bytes'] / 2**30:.2f}",
        f"{row['loss']:.5f}",
    ]
