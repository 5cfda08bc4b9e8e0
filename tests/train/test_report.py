# SPDX-License-Identifier: Apache-2.0
"""`liger report`: pictures, tables and statements show what is in the rows."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import pytest

from bench.commands import InProcess, assert_refused, cells
from liger_core.errors import OptionError
from liger_train.implementations import IMPLEMENTATIONS
from liger_train.report.page import page, sweep_command
from liger_train.report.pictures import COLORS, sweep_picture
from liger_train.report.statements import statements
from liger_train.report.sweeps import Sweep, read, sweeps
from liger_train.row import NOT_RUN, SETUP, Row, row_of
from liger_train.setup import Setup
from liger_train.sweep_runs import setups_of

GIB = 1 << 30
WHERE = {
    "machine": "NVIDIA H200; Some CPU, 16 threads", "versions": "torch 9.9", "commit": "abc",
    "date": "2026-11-21T10:00:00+00:00",
}  # fmt: skip
IN_24_GIB = Setup("llama-3.2-1b", precision="fp16", shard="zero3", offload="parameters", memory_limit=24 * GIB, steps=6)
STRATEGIES = ["none", "all-but-loss", "all"]
# Bytes per token of a step, and tokens per second; not those of any machine.
COSTS = {"none": (1_600_000, 1000.0), "all-but-loss": (1_550_000, 1010.0), "all": (100_000, 1500.0)}
COSTS["liger-kernel"] = COSTS["all"]


def row(setup: Setup, **results: Any) -> Row:
    """A run whose memory grows with its tokens, up to its limit."""
    bytes_of_each, speed = COSTS[setup.liger]
    peak = setup.batch * setup.sequence * bytes_of_each + GIB
    found: dict[str, Any] = {"low_tokens_per_second": speed - 50, "high_tokens_per_second": speed + 50}
    found |= {"tokens_per_second": speed, "peak_bytes": peak, "static_bytes": GIB, "losses": [11.0, 10.5]}
    if setup.memory_limit and peak > setup.memory_limit:
        found = {"out_of_memory": True, "reason": "out of memory: 2 GiB"}
    return row_of(setup, WHERE, found | results)


def by_batch(*batches: int, base: Setup = IN_24_GIB, strategies: list[str] = STRATEGIES) -> list[Row]:
    return [row(setup) for setup in setups_of(base, {"batch": batches}, strategies)]


def written(folder: Path, rows: list[Row]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.json").write_text(json.dumps([each.columns() for each in rows]))
    return folder


def found(rows: list[Row]) -> list[Sweep]:
    return sweeps([each.columns() for each in rows])


def said(rows: list[Row]) -> dict[str, str]:
    (sweep,) = found(rows)
    return dict(statements(sweep))


def text_of(rows: list[Row]) -> str:
    records = [each.columns() for each in rows]
    return "\n\n".join(page(records, [(sweep, []) for sweep in sweeps(records)], [], [], "liger report results"))


@pytest.mark.parametrize(
    "other",
    [{"machine": "NVIDIA A100"}, {"adapter": "lora"}, {"memory_limit": 80 * GIB}, {"ranks": 2}, {"model": "qwen2-7b"}],
)
def test_what_differs_in_something_else_is_another_sweep(other: dict[str, Any]) -> None:
    rows = by_batch(1, 4)
    assert [each.axis for each in found(rows + [replace(each, **other) for each in rows])].count("batch") == 2


def test_strategies_differ_in_compiling_and_in_the_library() -> None:
    base = replace(IN_24_GIB, shard="none", offload="none")
    rows = [row(setup) for setup in setups_of(base, {"batch": [1, 4], "implementation": list(IMPLEMENTATIONS)}, [])]
    (sweep,) = found(rows)
    labels = ["Transformers", "Transformers, compiled", "liger-kernel", "Liger", "Liger, compiled"]
    assert [each.label for each in sweep.strategies] == labels
    assert sweep.strategy("all") == sweep.strategies[3]
    eager, compiled = sweep_command(sweep).splitlines()
    assert eager.endswith("--sweep batch=1,4 --strategies none,liger-kernel,all --out RESULTS")
    assert compiled.endswith("--compile default --sweep batch=1,4 --strategies none,all --out RESULTS")
    # It starts several ranks itself.
    command = sweep_command(found(by_batch(1, 4, base=replace(IN_24_GIB, ranks=2)))[0])
    assert (command[:12], "--sweep batch=1,4 --sweep ranks=2" in command) == ("liger train ", True)


def test_the_last_row_of_a_repeated_run_counts(tmp_path: Path) -> None:
    once = row(IN_24_GIB)
    again = replace(once, steps=20, commit="def", tokens_per_second=7.0)
    rows = read([written(tmp_path / "a", [once]), written(tmp_path / "b", [again])])
    assert [each["tokens_per_second"] for each in rows] == [7.0]


@pytest.mark.parametrize("order", [1, -1], ids=["resumed", "ended_before"])
def test_an_interrupted_run_gives_way_to_one_that_ended(order: int, tmp_path: Path) -> None:
    rows = [row(IN_24_GIB, interrupted=True, reason="interrupted"), row(IN_24_GIB, losses=[11.0] * 6)]
    assert [len(each["losses"]) for each in read([written(tmp_path, rows[::order])])] == [6]


def test_rows_that_are_not_of_training_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('[{"model": "tiny", "op": "rms_norm"}]')
    with pytest.raises(
        OptionError, match=r"train\.json must hold rows of liger train, got one without machine, versions, commit, date"
    ):
        read([tmp_path])


def test_shares_are_taken_where_all_three_have_figures() -> None:
    stated = said(by_batch(1, 4, 8, 16, 32))
    assert stated["share of the memory saved at 8 due to the fused loss"] == f"{145 / 150:.1%}"
    assert stated["share of the throughput gained at 8 due to the fused loss"] == f"{490 / 500:.1%}"
    assert stated["Transformers: growth of peak memory"] == "1,525.9 MiB per 1000 tokens"
    assert stated["tokens/s, Liger ÷ baseline, at 8"] == "1.50"
    rows = by_batch(8, 16, 32)
    stated = said([replace(each, out_of_memory=False, tokens_per_second=9.0, peak_bytes=GIB) for each in rows])
    assert stated["Transformers: first OOM"] == "no OOM up to 32"
    assert not any("share" in words for words in stated)


def on_cpu(**results: Any) -> list[Row]:
    base = Setup("tiny", precision="fp32", checkpoint="none", device="cpu")
    rows = by_batch(1, 4, base=base, strategies=["none", "all"])
    return [replace(each, machine="Some CPU, 2 threads", **results) for each in rows]


def test_memory_without_figures_has_no_picture_and_a_small_one_has_a_small_unit(tmp_path: Path) -> None:
    text = text_of(on_cpu(peak_bytes=17 << 19))
    assert "peak MiB" in text
    assert cells(text, "1", "Transformers")[5] == "8.50"
    rows = on_cpu(peak_bytes=None, static_bytes=None)
    (sweep,) = found(rows)
    sweep_picture(sweep, sweep.strategies, tmp_path / "speed.png")
    sweep_picture(found(on_cpu())[0], sweep.strategies, tmp_path / "both.png")
    # One panel instead of two.
    widths = [matplotlib.image.imread(tmp_path / f"{name}.png").shape[1] for name in ("speed", "both")]
    assert 2 * widths[0] == pytest.approx(widths[1], abs=2)
    assert "Peak memory was not measured." in text_of(rows)
    stated = said(rows)
    assert stated["Transformers: first OOM"] == "no OOM up to 4"
    assert stated["tokens/s, Liger ÷ baseline, at 4"] == "1.50"
    assert not [words for words in stated if "peak memory" in words]


def test_runs_that_ran_out_of_memory_failed_or_were_skipped_have_a_reason() -> None:
    small, large, left, broken = by_batch(8, 16, 32, 64, strategies=["none"])
    left = replace(left, out_of_memory=False, reason=f"{NOT_RUN}, since 16 × 1024 ran out of memory")
    broken = replace(broken, out_of_memory=False, failed=True, reason="ValueError: no such layer")
    text = text_of([small, large, left, broken])
    ends = [cells(text, value, "Transformers")[2] for value in ("16", "32", "64")]
    assert ends == ["out of memory", "not run", "failed"]
    assert "* Transformers at 16: out of memory: 2 GiB" in text
    assert "* Transformers at 64: ValueError: no such layer" in text
    assert said([small, large, left, broken])["Transformers: first OOM"] == "at 16"


def test_an_interrupted_run_says_how_far_it_came() -> None:
    assert "interrupted after 2 of 6 steps" in text_of([row(IN_24_GIB, interrupted=True)])
    assert "interrupted" not in text_of([row(IN_24_GIB)])


def crosses(path: Path, strategy: str) -> int:
    """How many pixels have the color of a strategy."""
    wanted = matplotlib.colors.to_rgb(COLORS[strategy])
    return int((abs(matplotlib.image.imread(path)[..., :3] - wanted).sum(-1) < 0.02).sum())


def test_a_picture_marks_what_ran_out_of_memory(tmp_path: Path) -> None:
    failed = by_batch(1, 4, 8, 16, 32, strategies=["none"])
    left_out = [*failed[:3], *(replace(each, out_of_memory=False, reason=NOT_RUN) for each in failed[3:])]
    for name, rows in (("failed", failed), ("left", left_out)):
        (sweep,) = found(rows)
        sweep_picture(sweep, sweep.strategies, tmp_path / f"{name}.png")
    # Four crosses of strokes that are two points wide.
    assert crosses(tmp_path / "failed.png", "none") > crosses(tmp_path / "left.png", "none") + 4 * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small sweeps and their timelines."""
    by_sequence = [row(each) for each in setups_of(replace(IN_24_GIB, batch=4), {"sequence": [512]}, STRATEGIES)]
    made = written(tmp_path_factory.mktemp("report"), by_batch(4, 16) + by_sequence)
    (made / "snapshots").mkdir()
    for liger in ("none", "all"):
        record: dict[str, Any] = {
            "setup": {name: getattr(replace(IN_24_GIB, liger=liger), name) for name in SETUP},
            "milliseconds": [0.0, 1.0],
        }
        names = ("weights", "gradients", "optimizer", "checkpoints", "logits and loss", "other")
        record["bytes"] = {name: [GIB, GIB] for name in names}
        record |= {"steps": [0.0], "asked": 9 * GIB, "peak": dict.fromkeys(record["bytes"], GIB)}
        (made / "snapshots" / f"{liger}.json").write_text(json.dumps(record))
    return made


def test_a_report_is_one_file_with_every_picture_in_it(liger: InProcess, folder: Path) -> None:
    code, errors = liger(
        "report", str(folder), "--docs", str(folder / "docs" / "page.md"), "--html", str(folder / "report.html")
    )
    assert code == 0, errors
    assert "drawing timeline-" in errors
    html, text = (folder / "report.html").read_text(), (folder / "docs" / "page.md").read_text()
    sources = re.findall(r'src="([^"]*)"', html)
    assert len(sources) == 5
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not any(word in html for word in ("<link", "<script"))
    assert set(re.findall(r"https?:[^\"<]*", html)) == set()
    assert "prefers-color-scheme: dark" in html
    named = re.findall(r"!\[[^]]*\]\(<([^>]*)>\)", text)
    assert len(named) == 5
    assert all((folder / "docs" / path).stat().st_size > 5000 for path in named)
    # What is found by the one is found by the other.
    assert cells(text, "4", "Transformers")[2] == "1,000"
    assert html.count("<td>Transformers</td>") == text.count("| Transformers |")
    assert re.findall(r"<h2>(.*?)</h2>", html) == re.findall(r"^## (.*)$", text, re.MULTILINE)


def test_a_report_escapes_what_rows_say(liger: InProcess, tmp_path: Path) -> None:
    written(tmp_path, [replace(row(IN_24_GIB), failed=True, tokens_per_second=None, reason="<b>|&")])
    assert liger("report", str(tmp_path), "--html", str(tmp_path / "page.html"))[0] == 0
    assert "&lt;b&gt;|&amp;" in (tmp_path / "page.html").read_text()


def test_a_report_without_results_writes_nothing(liger: InProcess, tmp_path: Path) -> None:
    sentence = "which liger train --out FOLDER and liger bench --out FOLDER write"
    assert_refused(liger, sentence, "report", str(tmp_path))
    assert not list(tmp_path.iterdir())
