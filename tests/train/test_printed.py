# SPDX-License-Identifier: Apache-2.0
"""Tables of `liger train`, `plan` and `report`: they fit 100 columns, sizes have digits, and a ratio within the spread
says so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.commands import cells
from liger_bench.printing import amount, size
from liger_train.plan import planning
from liger_train.plan.comparison import Compared
from liger_train.plan.step import Prediction
from liger_train.plan.tables import print_compared, print_plan
from liger_train.row import Row, row_of
from liger_train.runs import command, sweep
from liger_train.setup import Setup

WHERE = {
    "machine": "Some CPU, 2 threads", "versions": "python 3.11, liger-core 1, torch 9.9, transformers 5",
    "commit": "abc", "date": "",
}  # fmt: skip
TINY = Setup("tiny", device="cpu", precision="fp32", checkpoint="none")
LONG = Setup(
    "llama-3.2-1b", 112, 24576, shard="zero3", offload="parameters", precision="fp16", memory_limit=24 << 30,
    optimizer="galore",
)  # fmt: skip
MIB = 1 << 20
SPEEDS = ("tokens_per_second", "low_tokens_per_second", "high_tokens_per_second")


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was printed, of which no table is wider than 100 columns, and nothing is cut."""
    monkeypatch.setenv("COLUMNS", "100")

    def read() -> str:
        text = capsys.readouterr().out
        tables = [line for line in text.splitlines() if line[:1] in "┏┃┡│└█"]
        assert tables
        assert max(map(len, tables)) <= 100
        assert "…" not in text
        return text

    return read


def trained(liger: str, speed: float, spread: float = 10.0, **results: Any) -> Row:
    found: dict[str, Any] = {"peak_bytes": 64 * MIB, "static_bytes": 24 * MIB, "losses": [10.5, 10.25]}
    found |= dict(zip(SPEEDS, (speed, speed - spread, speed + spread), strict=True))
    return row_of(replace(TINY, liger=liger), WHERE, found | results)


def test_a_ratio_within_the_spread_of_the_steps_is_marked(printed: Callable[[], str]) -> None:
    sweep.print_rows([trained("none", 1000.0), trained("all-but-loss", 1020.0), trained("all", 1300.0)], ["batch"])
    text = printed()
    assert cells(text, "all-but-loss")[3] == "≈ 1.02"
    assert cells(text, "all")[3] == "1.30"
    assert cells(text, "none")[3] == "1.00"
    assert "÷ none  ≈ within the spread of the steps: their 20th to 80th percentiles overlap" in text


def test_small_memory_has_digits_and_what_no_ratio_has_is_not_explained(printed: Callable[[], str]) -> None:
    sweep.print_rows([trained("none", 1000.0), trained("all", 1300.0, peak_bytes=17 * MIB // 2)], ["batch"])
    text = printed()
    assert ("peak MiB" in text, "≈" in text) == (True, False)
    assert cells(text, "all")[4:6] == ["8.50", "0.13"]


def test_a_run_is_summarized_in_few_lines(printed: Callable[[], str]) -> None:
    parameters = {
        "parameters": 2_150_000, "trainable_parameters": 33_792, "step_seconds": 0.1, "replaced": "rope 2, swiglu 2",
    }  # fmt: skip
    command._print(trained("all", 1000.0, **parameters), printed=[])
    text = printed()
    assert cells(text, "parameters")[1] == "2.15 M, 33.8 K of them trained"
    assert cells(text, "peak memory")[1] == "64 MiB, 24 MiB of it between steps"
    assert text.splitlines()[-1] == "Some CPU, 2 threads; torch 9.9, transformers 5, commit abc"
    assert len(text.splitlines()) < 12


def test_a_plan_fits_a_terminal(printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    def foresee(setup: Setup) -> Prediction:
        held = {"weights": 2_500_000_000_000, "logits and loss": 250_000_000_000}
        return Prediction(setup, sum(held.values()), held, "weight update", 1 << 40, 1_235_814_400, 1_235_814_400)

    monkeypatch.setattr(planning, "predict", foresee)
    setup = replace(LONG, optimizer="adamw", shard="none", offload="none", ranks=2)
    found = planning.make_plan(setup, 24 << 30, techniques=True)
    print_plan(found)
    text = printed()
    assert cells(text, "--optimizer adamw-torchao-4bit")[1:3] == ["2561.14", "+0.00"]
    assert "1.24 B parameters\n" in text
    assert "do not fit with any of these techniques" in text
    offered = [other.technique for other in found.alternatives if other.prediction]
    assert len(offered) > 10
    assert all(f"│ --{technique.option} {technique.value} " in text for technique in offered)


def test_a_comparison_fits_a_terminal(printed: Callable[[], str]) -> None:
    print_compared(
        [Compared(LONG, 23 << 30, 20 << 30, 24 << 30, True, True), Compared(LONG, 23 << 30, None, None, True, False)]
    )
    text = " ".join(printed().replace("│", " ").split())
    assert "23.00 20.00 +15.0% wrong" in text
    assert "out of memory" in text


@pytest.mark.parametrize(
    ("written", "count", "words"),
    [
        (amount, 1_235_814_400, "1.24 B"), (amount, 123_456_789, "123 M"), (amount, 33_792, "33.8 K"),
        (amount, 999, "999"), (amount, 0, "0"),
        (size, 1 << 40, "1,024 GiB"), (size, 67_757_454, "64.62 MiB"), (size, 4096, "4 KiB"), (size, 0, "0 bytes"),
    ],
)  # fmt: skip
def test_an_amount_has_three_digits_and_a_size_two_decimals(
    written: Callable[[int], str], count: int, words: str
) -> None:
    assert written(count) == words
