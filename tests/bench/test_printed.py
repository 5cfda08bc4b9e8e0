# SPDX-License-Identifier: Apache-2.0
"""What commands print fits a terminal of 100 columns, with every name in full; shown with results that were measured on
GPUs."""

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from liger_bench.bench.rows import OpRow, read_csv
from liger_bench.bench.table import print_rows
from liger_train.demo import command as demo

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WIDTH = 100
Read = Callable[[], str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Read:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return lambda: capsys.readouterr().out


def fits(text: str, names: Iterable[str] = ()) -> bool:
    lines = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
    cells = {cell.strip() for line in lines for cell in line.replace("┃", "│").split("│")}
    return bool(lines) and max(map(len, lines)) <= WIDTH and "…" not in text and set(names) <= cells


def test_liger_bench(printed: Read) -> None:
    names, stored = [field.name for field in fields(OpRow)], read_csv(next(RESULTS.glob("*-all-ops/results.csv")))
    rows = [OpRow(**{name: row.get(name.rstrip("_")) for name in names}) for row in longest(stored)]
    print_rows(rows, {})
    assert fits(printed(), {name for row in rows for name in (row.op, row.workload, row.implementation, row.pass_)})


def longest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each column the row with the longest word, so that they all meet in one table."""
    names = ("op", "workload", "implementation", "pass", "median_ms")
    return [max(rows, key=lambda row, name=name: len(f"{row[name]}")) for name in names]


def test_liger_demo(printed: Read) -> None:
    demo._print(json.loads((RESULTS / "2026-11-21-one-h200" / "demo-1b.json").read_text()), Path("demo"))
    assert fits(printed(), {"peak memory of LM head and loss", "tokens per second"})


@pytest.mark.parametrize(
    ("command", "names"), [("doctor", {"reference", "triton"}), ("ops", {"linear_cross_entropy", "add_rms_norm"})]
)
@pytest.mark.usefixtures("printed")
def test_liger(command: str, names: set[str], liger_output: Callable[..., tuple[int, str, str]]) -> None:
    assert fits(liger_output(command)[1], names)


@pytest.mark.usefixtures("printed")
def test_the_help_of_liger_bench_says_where_the_options_of_its_default_command_are(
    liger_output: Callable[..., tuple[int, str, str]],
) -> None:
    for command in (["bench", "--help"], ["bench", "ops", "--help"]):
        text = " ".join(liger_output(*command)[1].replace("│", " ").split())
        assert {option for option in ("--quick", "--peers", "--out") if option not in text} == set()
        assert "liger bench ops --help" in text or "ops" in command
