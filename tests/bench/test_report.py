# SPDX-License-Identifier: Apache-2.0
"""`liger bench report`: the page says what the results say, and the committed page is the one of the committed results."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import pytest

from bench.commands import Finished, InProcess
from liger_bench.bench.rows import HEADER
from liger_bench.model.implementations import IMPLEMENTATIONS
from liger_bench.model.job import COLUMNS
from liger_bench.records import MODEL_IDENTITY, OP_IDENTITY, SHARDED_IDENTITY, read, sizes_of
from liger_bench.report.page import page
from liger_bench.report.pictures import COLORS, LABEL_GAP, _spread, styles
from liger_bench.sharded.job import Row
from liger_bench.targets import Target, Verdict, judged, read_reasons, read_targets
from liger_core import OptionError
from liger_core.builtin import CATALOGUE
from liger_hf.presets import PRESETS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
WHERE = {"machine": "NVIDIA H200; Some CPU, 16 threads", "versions": "torch 9.9", "commit": "abc", "date": "2026-11-21T10:00:00+00:00"}
LIMITS = {"copy_bytes_per_second": 4.25e12, "product_flops_per_second": 7e14}


def op_row(implementation: str = "triton", **columns: Any) -> dict[str, Any]:
    """A row of `liger bench` with figures."""
    row = dict.fromkeys(HEADER) | WHERE | LIMITS
    row |= {"op": "rms_norm", "workload": "32x64", "implementation": implementation, "kind": "backend", "pass": "full"}
    row |= {"device": "cuda", "dtype": "bfloat16", "graph_reason": "", "overwrites": "", "reason": "", "failed": False}
    row |= {"median_ms": 0.2, "low_ms": 0.19, "high_ms": 0.22, "limit_ms": 0.18, "share": 0.9, "peak_extra_bytes": 3 << 20}
    return row | columns


def model_row(implementation: str = "liger", **columns: Any) -> dict[str, Any]:
    """A row of `liger bench model` with figures."""
    row = dict.fromkeys(COLUMNS) | WHERE
    row |= {"model": "1b", "batch": 8, "sequence": 1024, "implementation": implementation, "device": "cuda", "dtype": "bfloat16"}
    row |= {"tokens_per_second": 2000.0, "low_tokens_per_second": 1900.0, "high_tokens_per_second": 2100.0, "peak_bytes": 5 << 30}
    row |= {"loss": 11.5, "grad_norm": 1.25, "compile_seconds": 3.0, "out_of_memory": False, "failed": False, "reason": ""}
    return row | columns


def declined(implementation: str, **columns: Any) -> dict[str, Any]:
    """A row without figures."""
    empty = {"median_ms": None, "low_ms": None, "high_ms": None, "share": None, "peak_extra_bytes": None, "pass": ""}
    return op_row(implementation, **empty, **columns)


def results(folder: Path, ops: list[dict[str, Any]], models: list[dict[str, Any]] | None = None) -> Path:
    (folder / "results.json").write_text(json.dumps(ops))
    (folder / "model.json").write_text(json.dumps(models or []))
    return folder


def text_of(folder: Path, verdicts: list[Verdict] | None = None) -> str:
    return page(read(folder), verdicts or [], {}, "liger bench report results")


def cells(text: str, *wanted: str) -> list[str]:
    """The cells of the first line of a table that has all the wanted ones."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return next(line for line in lines if set(wanted) <= set(line))


def test_a_figure_of_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    text = text_of(results(tmp_path, [op_row(error_gradients=2.5e-3, error_eager_ratio=0.97)]))
    assert cells(text, "32x64", "**triton**")[2:] == ["0.200 (0.190–0.220)", "0.90", "–", "–", "2.5e-03", "0.97"]


def test_the_last_measurement_of_the_same_thing_counts(tmp_path: Path) -> None:
    read_ = read(results(tmp_path, [op_row(median_ms=1.0), op_row("eager"), op_row(median_ms=2.0, commit="def")]))
    assert [(row["implementation"], row["median_ms"]) for row in read_.ops] == [("triton", 2.0), ("eager", 0.2)]


def test_rows_are_identified_by_columns_that_exist() -> None:
    assert set(OP_IDENTITY) <= set(HEADER)
    assert set(MODEL_IDENTITY) <= set(COLUMNS)
    assert set(SHARDED_IDENTITY) <= {field.name for field in fields(Row)}


def test_rows_along_a_size_are_kept_out_of_the_tables(tmp_path: Path) -> None:
    found = read(results(tmp_path, [op_row(), op_row(workload="64x64-N", axis="N", axis_value=64)]))
    assert [len(found.ops), len(found.scaling)] == [1, 1]
    assert "64x64-N" not in text_of(tmp_path)


def test_implementations_of_a_shape_are_adjacent(tmp_path: Path) -> None:
    rows = [op_row(), op_row(workload="8x8"), op_row("eager"), op_row("eager", workload="8x8")]
    lines = [line for line in text_of(results(tmp_path, rows)).splitlines() if "0.200 (" in line]
    assert [line.split("|")[1:3] for line in lines] == [
        [" 32x64 ", " **triton** "],
        ["  ", " eager "],
        [" 8x8 ", " **triton** "],
        ["  ", " eager "],
    ]


def test_what_has_no_figures_is_listed_once_with_its_reason(tmp_path: Path) -> None:
    rows = [op_row(), declined("quack", reason="not installed"), declined("quack", workload="8x8", reason="not installed")]
    text = text_of(results(tmp_path, rows))
    assert "* 32x64, quack; 8x8, quack: not installed" in text
    assert "| quack |" not in text


def test_the_page_has_machine_versions_commit_and_date(tmp_path: Path) -> None:
    text = text_of(results(tmp_path, [op_row()]))
    for words in ("one NVIDIA H200 (Some CPU, 16 threads)", "* date: 2026-11-21\n", "* commit: abc\n", "* torch 9.9\n", "copy 4.25 TB/s"):
        assert words in text


def test_models_are_compared_with_those_of_the_same_shape(tmp_path: Path) -> None:
    rows = [model_row("hf", tokens_per_second=1000.0), model_row("hf", batch=1, tokens_per_second=500.0), model_row()]
    line = cells(text_of(results(tmp_path, [], rows)), "**liger**")
    assert line[2:6] == ["2,000", "1,900 – 2,100", "2.00", "–"]


def test_a_model_that_does_not_fit_is_reported_as_out_of_memory(tmp_path: Path) -> None:
    empty = model_row("hf", memory_limit_bytes=24 << 30, tokens_per_second=None, out_of_memory=True, reason="out of memory: 2 GiB")
    text = text_of(results(tmp_path, [], [empty]))
    assert cells(text, "hf")[:3] == ["llama-3.2-1b 8 × 1024 in 24 GiB", "hf", "out of memory"]
    assert "* llama-3.2-1b 8 × 1024 in 24 GiB hf: out of memory: 2 GiB" in text


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"must hold results\.json, model\.json or sharded\.json"):
        read(tmp_path)


def test_heads_on_several_ranks_have_a_table(tmp_path: Path) -> None:
    same = {"op": "linear_cross_entropy", "rows": 8, "width": 4, "classes": 50, "device": "cuda", "dtype": "bfloat16", "reason": ""}
    same |= {"machine": "m", "versions": "v", "commit": "c", "date": "d"}
    liger = same | {"implementation": "liger", "ranks": 2, "seconds": 0.01912, "efficiency": 1.0119, "peak_bytes": 3 << 20}
    failed = same | {
        "implementation": "gathered",
        "ranks": 2,
        "seconds": None,
        "efficiency": None,
        "peak_bytes": None,
        "reason": "out of memory",
    }
    (tmp_path / "sharded.json").write_text(json.dumps([liger, failed]))
    text = text_of(tmp_path)
    assert "## Sharded vocabulary" in text
    assert cells(text, "**Liger**") == ["linear_cross_entropy", "8 × 4 × 50", "2", "**Liger**", "19.12", "1.012", "3"]
    assert cells(text, "gathered")[-3:] == ["out of memory", "–", "–"]


def test_results_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"must hold results of one machine and dtype, got bfloat16 on .*; float32 on "):
        read(results(tmp_path, [op_row(), op_row(dtype="float32")]))


def target(bound: str = "<= 1.04", metric: str = "median_ms", against: dict[str, Any] | None = None, **row: Any) -> Target:
    return Target("t", {"op": "rms_norm", "implementation": "triton"} | row, metric, bound, against)


@pytest.mark.parametrize(
    ("made", "value"),
    [
        (target(), 0.2),
        (target(against={"metric": "limit_ms"}), 0.2 / 0.18),
        (target(against={"implementation": "eager"}), 0.2 / 0.4),
        (target(against={"implementation": "eager", "metric": "limit_ms"}), 0.2 / 0.36),
        (target(op="rope"), None),
        (target(metric="graph_ms"), None),
        (target(against={"metric": "graph_ms"}), None),
        (target(against={"implementation": "quack"}), None),
    ],
    ids=["value", "ratio_in_row", "ratio_of_rows", "ratio_of_rows_and_columns", "no_row", "no_value", "no_divisor", "no_other_row"],
)
def test_a_target_takes_its_value_from_the_rows(made: Target, value: float | None) -> None:
    found = made.reached([op_row("eager", median_ms=0.4, limit_ms=0.36), op_row()])
    assert found == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("bound", "value", "word"),
    [
        ("<= 1.04", 1.04, "met"),
        ("<= 1.04", 1.0401, "missed"),
        (">= 0.90", 0.90, "met"),
        (">= 0.90", 0.8999, "missed"),
        ("<= 300 MiB", 300 << 20, "met"),
        ("<= 2.1 GiB", 3 << 30, "missed"),
        (">= 1", None, "not measured"),
    ],
)
def test_a_target_is_judged_by_its_bound(bound: str, value: float | None, word: str) -> None:
    assert Verdict(target(bound), value).word == word


@pytest.mark.parametrize(
    ("copy_ms", "bound"), [(0.24, ">= 0.712"), (0.18, ">= 0.90"), (None, ">= 0.90")], ids=["slow_copy", "fast_copy", "no_copy"]
)
def test_a_copy_of_the_same_size_lowers_the_bound_of_a_target(copy_ms: float | None, bound: str) -> None:
    made = replace(target(">= 0.90", "share"), of_copy=0.95)
    (verdict,) = judged([made], [op_row(copy_ms=copy_ms)], {})
    assert verdict.target.bound == bound


@pytest.mark.parametrize(("value", "word"), [(1.0009, "equal"), (0.9991, "equal"), (1.002, "missed"), (0.998, "met")])
def test_ratios_within_the_spread_are_equal(value: float, word: str) -> None:
    assert replace(target("<= 1.0"), equal_within=0.001).verdict(value) == word


def test_a_stated_figure_is_not_judged() -> None:
    assert target("stated").verdict(1.8471) == "stated"
    assert target("stated").shown(1.8471) == "1.847"


def test_the_page_opens_with_speed_and_memory_compared_with_transformers(tmp_path: Path) -> None:
    compared = [model_row("hf", tokens_per_second=1000.0, peak_bytes=4 << 30), model_row(tokens_per_second=1500.0, peak_bytes=1 << 30)]
    text = text_of(results(tmp_path, [op_row("eager", kind="peer", median_ms=0.4), op_row()], compared))
    head = text.split("## Whole models in detail")[0]
    assert "1.50 × the speed of Transformers, −75 % peak memory** (1.0 GiB instead of 4.0 GiB)" in head
    assert "**1,500 (1.50 ×)<br>1.0 GiB (−75 %)**" in head
    assert "**2.00 ×**" in cells(head, "[rms_norm](#rms_norm)")
    assert text.index("## How much faster and smaller") < text.index("## Ops in detail") < text.index("## How it was measured")


@pytest.mark.parametrize(
    ("bound", "value", "words"),
    [("<= 1.04", 1.0449, "1.045"), ("<= 0.002", 0.0016, "0.0016"), ("<= 300 MiB", 251.04 * 2**20, "251.0 MiB"), (">= 1", 1.0, "1")],
)
def test_a_value_is_shown_with_a_digit_more_than_its_bound(bound: str, value: float, words: str) -> None:
    assert target(bound).shown(value) == words


def test_a_missed_target_has_its_reason_and_a_met_one_has_none(tmp_path: Path) -> None:
    slow, fast = (Target(name, {"op": "rms_norm"}, "share", bound) for name, bound in (("slow", ">= 0.95"), ("fast", ">= 0.50")))
    rows = [op_row()]
    text = text_of(results(tmp_path, rows), judged([slow, fast], rows, {"slow": "the sky is high", "fast": "it is not shown"}))
    assert "Of 2 targets: 1 met, 1 missed." in text
    assert cells(text, "slow") == ["slow", "≥ 0.95", "0.900", "**missed**"]
    assert "* **slow** (0.900): the sky is high" in text
    assert "it is not shown" not in text


def test_a_copy_of_the_same_size_comes_before_the_implementations(tmp_path: Path) -> None:
    text = text_of(results(tmp_path, [op_row(copy_ms=0.24), op_row("eager")]))
    assert cells(text, "32x64", "*copy of as many bytes*")[:5] == ["32x64", "*copy of as many bytes*", "0.240", "0.75", "–"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "must be an object with row and targets"),
        ('{"row": {}, "targets": [{"id": "a"}]}', "must have bound, id, metric, row"),
        ('{"row": {}, "targets": [{"id": "a", "row": {}, "metric": "share", "bound": "about 1"}]}', "must be like '<= 1.04'"),
        ("{", "cannot be read"),
    ],
)
def test_a_file_that_holds_no_targets_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "targets.json").write_text(text)
    with pytest.raises(OptionError, match=re.escape(sentence)):
        read_targets(tmp_path / "targets.json")


def test_two_targets_of_one_id_are_refused(tmp_path: Path) -> None:
    line = {"id": "a", "row": {}, "metric": "share", "bound": ">= 1"}
    (tmp_path / "targets.json").write_text(json.dumps({"row": {}, "targets": [line, line]}))
    with pytest.raises(OptionError, match=r"ids of the targets .* must differ, got a twice"):
        read_targets(tmp_path / "targets.json")


def test_a_reason_for_an_unknown_target_is_refused(liger: InProcess, tmp_path: Path) -> None:
    results(tmp_path, [op_row()])
    (tmp_path / "targets.json").write_text('{"row": {}, "targets": []}')
    (tmp_path / "reasons.toml").write_text('"no such target" = "why"')
    files = ("--targets", str(tmp_path / "targets.json"), "--reasons", str(tmp_path / "reasons.toml"))
    code, errors = liger("bench", "report", str(tmp_path), "--docs", str(tmp_path / "page.md"), *files)
    assert code == 2
    assert "got no such target" in errors
    assert not (tmp_path / "page.md").exists()


def pictures(folder: Path) -> dict[str, Any]:
    return {path.name: matplotlib.image.imread(path) for path in (folder / "images" / "bench").glob("*.png")}


def test_every_kind_of_picture_shows_something(liger: InProcess, tmp_path: Path) -> None:
    shapes = [
        op_row(name, workload=w, **{"pass": p}) for name in ("triton", "eager") for w in ("32x64", "64x64") for p in ("forward", "full")
    ]
    along = [op_row(workload=f"{n}x64-N", axis="N", axis_value=n, median_ms=n / 100, low_ms=n / 101, high_ms=n / 99) for n in (32, 64, 128)]
    results(tmp_path, [*shapes, *along], [model_row("hf", tokens_per_second=1000.0), model_row()])
    code, _ = liger("bench", "report", str(tmp_path), "--docs", str(tmp_path / "page.md"))
    assert code == 0
    found = pictures(tmp_path)
    assert set(found) == {"rms_norm.png", "rms_norm-scaling.png", "models.png"}
    ours = matplotlib.colors.to_rgb(COLORS["triton"])
    assert all(min(image.shape[:2]) > 200 and abs(image[..., :3] - ours).sum(-1).min() < 0.02 for image in found.values())
    linked = re.findall(r"\]\((\S+\.png)\)", (tmp_path / "page.md").read_text())
    assert sorted(linked) == sorted(f"images/bench/{name}" for name in found)


def test_an_op_without_figures_has_no_picture(liger: InProcess, tmp_path: Path) -> None:
    results(tmp_path, [declined("triton", reason="no GPU")])
    code, _ = liger("bench", "report", str(tmp_path), "--docs", str(tmp_path / "page.md"))
    assert code == 0
    assert pictures(tmp_path) == {}
    assert ".png" not in (tmp_path / "page.md").read_text()


def test_labels_keep_their_order_and_a_distance() -> None:
    heights = [0.5, 0.51, 0.1, 0.505, 0.9]
    placed = _spread(heights, LABEL_GAP)
    assert sorted(range(5), key=placed.__getitem__) == sorted(range(5), key=heights.__getitem__)
    ordered = sorted(placed)
    assert all(b - a > LABEL_GAP - 1e-6 for a, b in pairwise(ordered))
    assert placed[2] == 0.1
    assert placed[4] == 0.9


def test_variants_of_an_implementation_share_its_color_and_differ_otherwise() -> None:
    look = styles(["liger-kernel", "liger-kernel fp32", "liger", "liger-compiled", "triton"])
    assert look["liger-kernel"].color == look["liger-kernel fp32"].color != look["triton"].color
    assert look["liger-kernel"].marker != look["liger-kernel fp32"].marker
    assert look["liger"].marker != look["liger-compiled"].marker


def test_a_report_of_a_real_run_has_its_figures(quick_bench: Finished, liger: InProcess, tmp_path: Path) -> None:
    code, errors = liger("bench", "report", str(quick_bench.folder), "--docs", str(tmp_path / "page.md"))
    assert code == 0, errors
    text = (tmp_path / "page.md").read_text()
    full = next(row for row in quick_bench.result["rows"] if row["implementation"] == "reference" and row["pass"] == "full")
    assert f"{full['share']:.2f}" in cells(text, "reference")
    assert full["commit"] in text


def test_the_committed_targets_are_about_things_that_exist() -> None:
    known = {op.name: {sizes_of(workload.name) for workload in op.workloads()} for op in CATALOGUE}
    columns = {*HEADER, *COLUMNS, "fits"}
    wrong = []
    for each in read_targets(ROOT / "benchmarks" / "targets.json"):
        row = each.row
        if "op" in row:
            fine = row["op"] in known and ("workload" not in row or sizes_of(row["workload"]) in known[row["op"]])
        else:
            fine = row["model"] in PRESETS and row["implementation"] in IMPLEMENTATIONS
        if not fine or not {each.metric, (each.against or {}).get("metric", each.metric)} <= columns:
            wrong.append(each.id)
    assert wrong == []


def test_the_committed_reasons_are_for_committed_targets() -> None:
    targets = read_targets(ROOT / "benchmarks" / "targets.json")
    assert read_reasons(ROOT / "benchmarks" / "reasons.toml").keys() <= {each.id for each in targets}


@pytest.mark.skipif(not PAGE.exists(), reason="no results are committed yet")
def test_the_committed_page_is_that_of_the_committed_results(liger: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    command = re.search(r"Generated by `(liger bench report [^`]+)`", text)
    assert command is not None
    # Paths on the page are those of the repository.
    monkeypatch.chdir(ROOT)
    code, errors = liger(*shlex.split(command[1])[1:], "--docs", str(tmp_path / "benchmarks.md"))
    assert code == 0, errors
    assert (tmp_path / "benchmarks.md").read_text() == text
    for picture in re.findall(r"\]\((\S+\.png)\)", text):
        assert (PAGE.parent / picture).exists()
