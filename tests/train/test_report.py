# SPDX-License-Identifier: Apache-2.0
"""`liger report`: pictures, tables and statements show what is in the rows."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import pytest

from bench.commands import InProcess
from liger_core.errors import OptionError
from liger_train.cells import cells, strategies_of, swept
from liger_train.implementations import IMPLEMENTATIONS
from liger_train.report.page import Pictures, page, sweep_command
from liger_train.report.pictures import COLORS, sweep_picture
from liger_train.report.statements import statements
from liger_train.report.sweeps import Sweep, others, read, sweeps
from liger_train.row import NOT_RUN, SETUP, Row, row_of
from liger_train.setup import Setup

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
WHERE = {
    "machine": "NVIDIA H200; Some CPU, 16 threads",
    "versions": "torch 9.9",
    "commit": "abc",
    "date": "2026-11-21T10:00:00+00:00",
}
IN_24_GIB = Setup("llama-3.2-1b", precision="fp16", shard="zero3", offload="parameters", memory_limit=24 * GIB, steps=6)
STRATEGIES = ["none", "all-but-loss", "all"]
# Bytes per token of a step, and tokens per second; not those of any machine.
COSTS = {"none": (1_600_000, 1000.0), "all-but-loss": (1_550_000, 1010.0), "all": (100_000, 1500.0)}
COSTS["liger-kernel"] = COSTS["all"]


def row(setup: Setup, **results: Any) -> Row:
    """A run whose memory grows with its tokens, up to its limit."""
    bytes_of_each, speed = COSTS[setup.liger]
    peak = setup.batch * setup.sequence * bytes_of_each + GIB
    found: dict[str, Any] = {
        "tokens_per_second": speed,
        "low_tokens_per_second": speed - 50,
        "high_tokens_per_second": speed + 50,
    }
    found |= {"peak_bytes": peak, "static_bytes": GIB, "losses": [11.0, 10.5]}
    if setup.memory_limit and peak > setup.memory_limit:
        found = {"out_of_memory": True, "reason": "out of memory: 2 GiB"}
    return row_of(setup, WHERE, found | results)


def by_batch(*batches: int, base: Setup = IN_24_GIB, strategies: list[str] = STRATEGIES) -> list[Row]:
    return [row(setup) for setup in cells(base, {"batch": batches}, strategies)]


def by_sequence(*sequences: int) -> list[Row]:
    return [row(setup) for setup in cells(replace(IN_24_GIB, batch=4), {"sequence": sequences}, STRATEGIES)]


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
    every = sweeps(records)
    parts = page(records, every, others(records, every), [], Pictures([[] for _ in every]), "liger report results")
    return "\n\n".join(parts)


def line(text: str, *wanted: str) -> list[str]:
    """The cells of the first line of a table that has all the wanted ones."""
    lines = [
        [cell.strip() for cell in each.strip("|").split("|")] for each in text.splitlines() if each.startswith("|")
    ]
    return next(cells for cells in lines if set(wanted) <= set(cells))


def test_a_folder_may_hold_several_sweeps() -> None:
    rows = by_batch(1, 4, 8) + by_sequence(512, 2048) + by_batch(1, 2, base=Setup("llama-3-8b", sequence=512))
    assert [(each.title, each.values) for each in found(rows)] == [
        # Batch 4 at 1024 is part of both.
        ("llama-3.2-1b: batch at sequence 1024", [1, 4, 8]),
        ("llama-3.2-1b: sequence at batch 4", [512, 1024, 2048]),
        ("llama-3-8b: batch at sequence 512", [1, 2]),
    ]


@pytest.mark.parametrize(
    "other",
    [{"machine": "NVIDIA A100"}, {"adapter": "lora"}, {"memory_limit": 80 * GIB}, {"ranks": 2}, {"model": "qwen2-7b"}],
)
def test_what_differs_in_something_else_is_another_sweep(other: dict[str, Any]) -> None:
    rows = by_batch(1, 4)
    assert [each.axis for each in found(rows + [replace(each, **other) for each in rows])].count("batch") == 2


def test_ranks_may_vary_too() -> None:
    rows = [row(replace(IN_24_GIB, ranks=ranks, liger=liger)) for ranks in (1, 2, 4) for liger in ("none", "all")]
    rows = [replace(each, tokens_per_second=1000.0 * each.ranks**0.5) for each in rows]
    (sweep,) = found(rows)
    assert (sweep.title, sweep.values) == ("llama-3.2-1b: ranks at batch 1, sequence 1024", [1, 2, 4])
    assert sweep.setting.endswith("; 24 GiB of NVIDIA H200 per rank")
    assert said(rows)["Liger: scaling of tokens/s"] == "2.00 × from 1 to 4"
    assert "--sweep ranks=1,2,4" in sweep_command(sweep)


def test_strategies_differ_in_checkpointing() -> None:
    rows = by_batch(1, 4, strategies=["all"]) + by_batch(
        1, 4, base=replace(IN_24_GIB, checkpoint="auto"), strategies=["none", "all"]
    )
    (sweep,) = found(rows)
    assert [each.label for each in sweep.strategies] == [
        "Transformers, checkpoint auto",
        "Liger, checkpoint full",
        "Liger, checkpoint auto",
    ]
    assert "checkpoint" not in sweep.setting


def test_strategies_differ_in_compiling_and_in_the_library() -> None:
    base = replace(IN_24_GIB, shard="none", offload="none")
    rows = [row(setup) for setup in cells(base, {"batch": [1, 4], "implementation": list(IMPLEMENTATIONS)}, [])]
    (sweep,) = found(rows)
    labels = ["Transformers", "Transformers, compiled", "liger-kernel", "Liger", "Liger, compiled"]
    assert [each.label for each in sweep.strategies] == labels
    assert sweep.strategy("all") == sweep.strategies[3]
    eager, compiled = sweep_command(sweep).splitlines()
    assert eager.endswith("--sweep batch=1,4 --strategies none,liger-kernel,all --out RESULTS")
    assert compiled.endswith("--compile default --sweep batch=1,4 --strategies none,all --out RESULTS")


def test_runs_that_vary_nothing_are_in_no_sweep() -> None:
    rows = [*by_batch(1, 4), row(replace(IN_24_GIB, adapter="lora"))]
    records = [each.columns() for each in rows]
    assert [each["adapter"] for each in others(records, sweeps(records))] == ["lora"]
    assert line(
        text_of(rows),
        "llama-3.2-1b 1 × 1024, fp16, shard zero3, offload parameters, adapter lora; 24 GiB of one NVIDIA H200",
    )


def test_the_last_row_of_a_repeated_run_counts(tmp_path: Path) -> None:
    once = row(IN_24_GIB)
    again = replace(once, steps=20, commit="def", tokens_per_second=7.0)
    assert [
        each["tokens_per_second"] for each in read([written(tmp_path / "a", [once]), written(tmp_path / "b", [again])])
    ] == [7.0]


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


def test_the_first_failure_of_each_strategy_is_stated() -> None:
    stated = said(by_batch(1, 4, 8, 16, 32, 64, 96, 112))
    assert stated["Transformers: first OOM"] == "at 16"
    assert stated["Liger without fused loss: first OOM"] == "at 16"
    assert stated["Liger: first OOM"] == "no OOM up to 112"


def test_runs_that_all_fit_have_no_first_failure_and_no_share() -> None:
    stated = said(
        [replace(each, out_of_memory=False, tokens_per_second=9.0, peak_bytes=GIB) for each in by_batch(8, 16, 32)]
    )
    assert stated["Transformers: first OOM"] == "no OOM up to 32"
    assert not any("share" in words for words in stated)


def test_shares_are_taken_where_all_three_have_figures() -> None:
    stated = said(by_batch(1, 4, 8, 16, 32))
    assert stated["share of the memory saved at 8 due to the fused loss"] == f"{145 / 150:.1%}"
    assert stated["share of the throughput gained at 8 due to the fused loss"] == f"{490 / 500:.1%}"
    assert stated["Transformers: growth of peak memory"] == "1,525.9 MiB per 1000 tokens"
    assert stated["tokens/s, Liger ÷ baseline, at 8"] == "1.50"


def test_ways_to_checkpoint_are_compared_where_both_have_figures() -> None:
    auto = [
        replace(each, checkpoint="auto", tokens_per_second=1500.0 + 10 * each.batch)
        for each in by_batch(1, 4, 8, strategies=["all"])
    ]
    auto[-1] = replace(auto[-1], tokens_per_second=None, out_of_memory=True)
    full = [replace(each, checkpoint="full") for each in by_batch(1, 4, 8, strategies=["none", "all"])]
    stated = said([*full, *auto])
    assert stated["tokens/s, Liger, checkpoint auto ÷ checkpoint full"] == "1.01 to 1.03 at 2 sizes"


def test_a_difference_within_the_spread_of_the_steps_has_no_share() -> None:
    noisy = [replace(each, low_tokens_per_second=500.0) if each.liger == "all" else each for each in by_batch(1, 4, 8)]
    stated = said(noisy)
    assert not any("throughput gained" in words for words in stated)
    assert "share of the memory saved at 8 due to the fused loss" in stated


def test_notes_of_older_versions_have_the_words_of_today_and_no_defaults() -> None:
    notes = [
        "--checkpoint full was chosen for a GPU: Of every layer only the input is kept.",
        "Chosen for NVIDIA H200: --precision bf16.",
    ]
    measured = json.loads((ROOT / "benchmarks/results/2026-11-21-h200-training-runs/train.json").read_text())
    notes.append(
        next(
            note
            for row in measured
            for note in row["notes"] or []
            if note.startswith("--checkpoint auto: from step 7 on 0 of")
        )
    )
    text = text_of(
        [replace(each, notes=notes[: 2 + (each.batch == 4)]) for each in by_batch(1, 4, strategies=["none", "all"])]
    )
    assert "hosen for" not in text
    auto = "from step 7 on, layers with full recompute: 0, with selective recompute: 0, without recompute: 32."
    assert f"* Transformers at 4; Liger at 4: --checkpoint auto: {auto}" in text


def test_a_figure_of_the_page_is_that_of_the_row_with_its_ratio_to_the_baseline() -> None:
    text = text_of(by_batch(1, 4))
    assert line(text, "4", "Transformers")[2:] == ["1,000", "950 – 1,050", "1.00", "7.10", "1.00", "10.5000"]
    assert line(text, "Liger", "0.19")[2:6] == ["1,500", "1,450 – 1,550", "1.50", "1.38"]


def test_a_ratio_within_the_spread_of_the_steps_is_marked() -> None:
    noisy = [replace(each, low_tokens_per_second=500.0) if each.liger == "all" else each for each in by_batch(1, 4)]
    text, stated = text_of(noisy), said(noisy)
    assert line(text, "4", "Transformers")[4] == "1.00"
    assert line(text, "Liger", "0.19")[4] == "≈ 1.50"
    assert line(text, "Liger without fused loss")[4] == "≈ 1.01"
    assert stated["tokens/s, Liger ÷ baseline, at 4"] == "≈ 1.50"
    assert stated["highest tokens/s, Liger ÷ baseline"] == "≈ 1.50 (at 1 ÷ at 1)"


ON_CPU = Setup("tiny", precision="fp32", checkpoint="none", device="cpu")


def on_cpu(**results: Any) -> list[Row]:
    return [
        replace(each, machine="Some CPU, 2 threads", **results)
        for each in by_batch(1, 4, base=ON_CPU, strategies=["none", "all"])
    ]


def test_small_memory_has_a_small_unit() -> None:
    text = text_of(on_cpu(peak_bytes=17 << 19))
    assert "peak MiB" in text
    assert line(text, "1", "Transformers")[5] == "8.50"


def test_speeds_without_memory_are_reported_without_an_empty_picture(tmp_path: Path) -> None:
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
    assert [line(text, value, "Transformers")[2] for value in ("16", "32", "64")] == [
        "out of memory",
        "not run",
        "failed",
    ]
    assert "* Transformers at 16: out of memory: 2 GiB" in text
    assert "* Transformers at 64: ValueError: no such layer" in text
    (sweep,) = found([small, large, left, broken])
    assert dict(statements(sweep))["Transformers: first OOM"] == "at 16"


def test_an_interrupted_run_says_how_far_it_came() -> None:
    assert "interrupted after 2 of 6 steps" in text_of([row(IN_24_GIB, interrupted=True)])
    assert "interrupted" not in text_of([row(IN_24_GIB)])


def test_the_command_of_a_sweep_repeats_it() -> None:
    rows = by_batch(1, 4, strategies=["none", "all"])
    words = shlex.split(sweep_command(found(rows)[0]))
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options["--memory-limit"] == "24GiB"
    base = Setup(
        "llama-3.2-1b",
        **{name: getattr(IN_24_GIB, name) for name in ("precision", "shard", "offload", "memory_limit", "steps")},
    )
    again = cells(base, swept([options["--sweep"]]), strategies_of(options["--strategies"]))
    assert {tuple(getattr(each, name) for name in SETUP) for each in again} == {
        tuple(getattr(each, name) for name in SETUP) for each in rows
    }
    assert all(
        f"--{name.replace('_', '-')}" in options for name in ("precision", "shard", "offload", "memory_limit", "steps")
    )


def test_a_sweep_of_several_ranks_starts_them_itself() -> None:
    command = sweep_command(found(by_batch(1, 4, base=replace(IN_24_GIB, ranks=2)))[0])
    assert command.startswith("liger train ")
    assert "--sweep batch=1,4 --sweep ranks=2" in command


def crosses(path: Path, strategy: str) -> int:
    """How many pixels have the color of a strategy."""
    wanted = matplotlib.colors.to_rgb(COLORS[strategy])
    return int((abs(matplotlib.image.imread(path)[..., :3] - wanted).sum(-1) < 0.02).sum())


def test_a_picture_marks_what_ran_out_of_memory(tmp_path: Path) -> None:
    rows = by_batch(1, 4, 8, strategies=["none"])
    failed = [*rows, *by_batch(16, 32, strategies=["none"])]
    (fitting,), (all_of_them,) = found(rows), found(failed)
    sweep_picture(fitting, fitting.strategies, tmp_path / "fitting.png")
    sweep_picture(all_of_them, all_of_them.strategies, tmp_path / "failed.png")
    unmarked = (
        replace(failed[-1], out_of_memory=False, reason=NOT_RUN),
        replace(failed[-2], out_of_memory=False, reason=NOT_RUN),
    )
    (left_out,) = found([*rows, *unmarked])
    sweep_picture(left_out, left_out.strategies, tmp_path / "left.png")
    # Four crosses of strokes that are two points wide.
    assert crosses(tmp_path / "failed.png", "none") > crosses(tmp_path / "left.png", "none") + 4 * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small sweeps and their timelines."""
    made = written(tmp_path_factory.mktemp("report"), by_batch(4, 16) + by_sequence(512))
    (made / "snapshots").mkdir()
    for liger in ("none", "all"):
        record: dict[str, Any] = {
            "setup": {name: getattr(replace(IN_24_GIB, liger=liger), name) for name in SETUP},
            "milliseconds": [0.0, 1.0],
        }
        record |= {
            "bytes": {
                name: [GIB, GIB]
                for name in ("weights", "gradients", "optimizer", "checkpoints", "logits and loss", "other")
            }
        }
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
    assert line(text, "4", "Transformers")[2] == "1,000"
    assert html.count("<td>Transformers</td>") == text.count("| Transformers |")
    assert re.findall(r"<h2>(.*?)</h2>", html) == re.findall(r"^## (.*)$", text, re.MULTILINE)


def test_a_report_escapes_what_rows_say(liger: InProcess, tmp_path: Path) -> None:
    written(tmp_path, [replace(row(IN_24_GIB), failed=True, tokens_per_second=None, reason="<b>|&")])
    assert liger("report", str(tmp_path), "--html", str(tmp_path / "page.html"))[0] == 0
    assert "&lt;b&gt;|&amp;" in (tmp_path / "page.html").read_text()


def test_a_report_without_results_writes_nothing(liger: InProcess, tmp_path: Path) -> None:
    code, errors = liger("report", str(tmp_path))
    assert (code, "which liger train --out FOLDER and liger bench --out FOLDER write" in errors) == (2, True)
    assert not list(tmp_path.iterdir())


def test_the_page_of_the_ablation_states_what_the_rows_show() -> None:
    page = (ROOT / "docs" / "ablation.md").read_text()
    folders = [ROOT / "benchmarks" / "results" / f"2026-11-21-h200-training-runs{end}" for end in ("-recorded", "")]
    every = [sweep for sweep in sweeps(read(folders)) if sweep.first["memory_limit"] == 24 * GIB]
    by_axis = {sweep.axis: dict(statements(sweep)) for sweep in every}
    for axis, words in (("batch", "at batch 16"), ("sequence", "at 4096 tokens")):
        assert by_axis[axis]["Transformers: first OOM"] == re.sub(r"batch | tokens", "", words)
        assert f"| {words} |" in page
    shares = {
        figure
        for stated in by_axis.values()
        for words, figure in stated.items()
        if words.startswith("share of the memory")
    }
    assert shares == {"99.3%"}
    assert "| nearly 100 % | 99.3 % |" in page
