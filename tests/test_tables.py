# SPDX-License-Identifier: Apache-2.0
"""Tables: whole names at any width, a legend, and only the columns that matter."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from liger_core.tables import WIDTH, Cell, Column, output, print_table

NAMES = Column("implementation")
COLUMNS = [
    NAMES,
    Column("ms", number=True),
    Column("share", "least possible time ÷ measured time", number=True),
    Column("graph", "replayed as a CUDA graph, in ms", number=True),
    Column("MiB", "peak memory", number=True, detail=True),
    Column("reason", prose=True),
]
ROW = ["liger-kernel long chunks", "1.250", "0.75", "–", "16.0", "declines rows that are wider than the largest block"]


def printed(
    width: int, columns: Sequence[Column] = COLUMNS, rows: Sequence[Sequence[Cell]] = (ROW,), all_columns: bool = False
) -> str:
    file = io.StringIO()
    print_table(Console(file=file, width=width, highlight=False), columns, rows, all_columns=all_columns)
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 60, 100, 200])
def test_a_name_is_whole_however_narrow_the_terminal(width: int) -> None:
    assert "│ liger-kernel long chunks │ 1.250 │" in printed(width)


@pytest.mark.parametrize("width", [20, 100])
def test_prose_wraps_between_words(width: int) -> None:
    lines = [line.split("│")[-2].strip() for line in printed(width).splitlines() if line.startswith("│")]
    assert " ".join(filter(None, lines)) == ROW[-1]


def test_a_wide_terminal_needs_no_wrapping() -> None:
    assert ROW[-1] in printed(120)


def test_the_legend_explains_the_columns_that_are_shown_and_names_the_details() -> None:
    legend = ["share  least possible time ÷ measured time", "--all-columns also shows MiB."]
    text, whole = printed(100), printed(100, all_columns=True)
    assert text.splitlines()[-2:] == legend
    assert {words: (words in text, words in whole) for words in ("16.0", "graph", "--all-columns")} == {
        "16.0": (False, True),
        # Without a value.
        "graph": (False, True),
        "--all-columns": (True, False),
    }
    assert "graph" in printed(100, rows=[])


def test_brackets_in_a_cell_are_not_markup() -> None:
    assert "│ [red]x[/red]   │" in printed(100, [NAMES], [["[red]x[/red]"]])


def test_sentences_in_a_file_stay_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console = output()
    console.print("word " * 60)
    print_table(console, COLUMNS, [ROW])
    sentence, *table = capsys.readouterr().out.splitlines()
    assert len(sentence) == 300
    assert max(map(len, table)) <= WIDTH
