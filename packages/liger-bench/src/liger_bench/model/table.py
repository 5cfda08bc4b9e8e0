# SPDX-License-Identifier: Apache-2.0
"""The rows of models as the words of a table, on the terminal and on a page alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liger_bench.printing import speed_ratio
from liger_core.tables import Column

BASES = ("hf", "hf-compiled", "liger-kernel")
FIGURES = (
    Column("tokens/s", "median of the timed steps", number=True),
    Column("0.2 – 0.8", "quantiles of the same", number=True, detail=True),
    Column("÷ hf", "tokens/s ÷ those of Transformers alone", number=True),
    *(Column(f"÷ {base}", number=True, detail=True) for base in BASES[1:]),
    Column("peak GiB", "most memory held at once", number=True),
    Column("loss", "of the first step", number=True),
    Column("gradient norm", number=True, detail=True),
    Column("compile s", "first step minus a median one", number=True, detail=True),
)
HEAD = tuple(column.name for column in FIGURES)


def cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A cell for each column of HEAD; `rows` are those to compare with."""
    if row["tokens_per_second"] is None:
        return ["out of memory" if row["out_of_memory"] else "–", *["–"] * (len(HEAD) - 1)]
    return [
        f"{row['tokens_per_second']:,.0f}",
        f"{row['low_tokens_per_second']:,.0f} – {row['high_tokens_per_second']:,.0f}",
        *(speed_ratio(row, base, rows, title) for base in BASES),
        f"{row['peak_bytes'] / 2**30:.2f}",
        f"{row['loss']:.5f}",
        f"{row['grad_norm']:.5g}",
        f"{row['compile_seconds']:.1f}",
    ]


def title(row: Mapping[str, Any]) -> str:
    """The model and its shape, and the memory that it was allowed."""
    limit = row["memory_limit_bytes"]
    return f"{row['model']} {row['batch']} × {row['sequence']}" + (f" in {limit / 2**30:g} GiB" if limit else "")
