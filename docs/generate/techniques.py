# SPDX-License-Identifier: Apache-2.0
"""The tables of techniques in docs/training.md: `python docs/generate/techniques.py` writes them.

They are in the repository, where its reader finds them; tests/docs/test_site.py says when they are stale.
"""

from pathlib import Path

import docstrings

from liger_bench import markdown
from liger_train.setup import Setup
from liger_train.technique import Technique
from liger_train.techniques import LIST, NUMBER, TECHNIQUES

PAGE = Path(__file__).parents[1] / "training.md"
SHOWN = {NUMBER: "a number", LIST: "ops, separated by commas"}
HEAD = ("value", "what it does", "saves", "costs", "implemented by")


def table() -> str:
    """One table per option, in Markdown."""
    return "\n\n".join(
        f"### `--{option}`\n\n{markdown.table(HEAD, map(_row, values.values()))}"
        for option, values in TECHNIQUES.items()
    )


def filled(text: str) -> str:
    return docstrings.filled(text, techniques=table())


def _row(technique: Technique) -> tuple[str, ...]:
    value = SHOWN.get(technique.value, f"`{technique.value}`")
    if technique.value == str(getattr(Setup, technique.option)):
        value += " (default)"
    carried = technique.implemented_by
    if technique.packages:
        carried += f"; `pip install {' '.join(technique.packages)}`"
    where = f" Only on a GPU: {technique.reason}." if technique.devices == ("cuda",) else ""
    return value, technique.summary + where, technique.saves, technique.costs, carried


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
