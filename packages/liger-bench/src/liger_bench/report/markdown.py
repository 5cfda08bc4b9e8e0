# SPDX-License-Identifier: Apache-2.0
"""The parts of a page in Markdown that reports have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from liger_bench.report.records import Record, distinct


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], right: Iterable[int] = ()) -> str:
    """`right`: the columns that are aligned to the right."""
    marks = ["---:" if place in set(right) else "---" for place in range(len(head))]
    lines = [head, marks, *([escaped(str(cell)) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sparse(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The first cell only where it changes."""
    before: list[str] = ["", *(row[0] for row in rows)]
    return [["" if row[0] == last else row[0], *row[1:]] for row, last in zip(rows, before, strict=False)]


def reasons(pairs: Iterable[tuple[str, str]]) -> str:
    """Why there are no figures, one line for all that share a reason."""
    who: dict[str, list[str]] = {}
    for name, reason in pairs:
        if reason:
            who.setdefault(reason, []).append(name)
    return "\n".join(f"* {'; '.join(names)}: {escaped(reason)}" for reason, names in who.items())


def where(rows: Sequence[Record]) -> list[str]:
    """Where and when rows were measured: a sentence, then items of a list; the versions of the rows may follow."""
    dates = sorted({row["date"][:10] for row in rows})
    commits = distinct(rows, "commit")
    return [
        f"Measured on {' and '.join(_machine(m, d) for m, d in dict.fromkeys((r['machine'], r['device']) for r in rows))}.",
        f"* {'date' if len(dates) == 1 else 'dates'}: {', '.join(dates)}",
        f"* {'commit' if len(commits) == 1 else 'commits'}: {', '.join(commits)}",
    ]


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _machine(machine: str, device: str) -> str:
    first, _, host = machine.partition("; ")
    return f"one {first} ({host})" if device == "cuda" else f"a CPU ({machine})"
