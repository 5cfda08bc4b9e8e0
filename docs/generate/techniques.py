# SPDX-License-Identifier: Apache-2.0
"""The tables of techniques in docs/training.md: `python docs/generate/techniques.py` writes them.

They are in the repository, where its reader finds them; tests/docs/test_site.py says when they are stale.
"""

from __future__ import annotations

from pathlib import Path

from liger_train.setup import Setup
from liger_train.technique import Technique
from liger_train.techniques import LIST, NUMBER, TECHNIQUES

PAGE = Path(__file__).parents[1] / "training.md"
BEGIN, END = "<!-- techniques: begin -->", "<!-- techniques: end -->"
SHOWN = {NUMBER: "a number", LIST: "ops, separated by commas"}
HEAD = ("value", "what it does", "saves", "costs", "implemented by")


def table() -> str:
    """One table per option, in Markdown."""
    return "\n\n".join(_of_option(option, values) for option, values in TECHNIQUES.items())


def filled(text: str) -> str:
    """A page with the tables between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _of_option(option: str, values: dict[str, Technique]) -> str:
    rows = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD), *(_row(technique) for technique in values.values())]
    return f"### `--{option}`\n\n" + "\n".join(rows)


def _row(technique: Technique) -> str:
    value = SHOWN.get(technique.value, f"`{technique.value}`")
    if technique.value == str(getattr(Setup, technique.option)):
        value += " (default)"
    carried = technique.implemented_by + (
        f"; `pip install {' '.join(technique.packages)}`" if technique.packages else ""
    )
    where = f" Only on a GPU: {technique.reason}." if technique.devices == ("cuda",) else ""
    return f"| {value} | {technique.summary}{where} | {technique.saves} | {technique.costs} | {carried} |"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
