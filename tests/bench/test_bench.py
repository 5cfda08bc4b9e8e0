# SPDX-License-Identifier: Apache-2.0
"""`liger bench`: complete rows, files that grow, and reasons instead of crashes."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.commands import LIMITS, Finished, InProcess
from liger_bench.bench.case import constants, make_case
from liger_bench.bench.implementations import backend
from liger_bench.bench.measure import Bench
from liger_bench.bench.rows import HEADER, OpRow
from liger_bench.machine import ENVIRONMENT
from liger_bench.measurements import Files
from liger_core import Backend, OptionError, Unsupported, Workload, rms_norm, rope, selection, swiglu
from liger_core.plugins import registry

pytestmark = pytest.mark.slow

FIGURES = (
    "median_ms", "low_ms", "high_ms", "repetitions", "peak_extra_bytes", "peak_beyond_gradients_bytes",
    "error_outputs", "error_gradients", "error_eager_ratio",
)  # fmt: skip
# Where and how a row was measured.
WHERE = ("machine", "versions", "commit", "date", "copy_bytes_per_second", "product_flops_per_second")
CPU = torch.device("cpu")
RUN = Bench(CPU, torch.float32, LIMITS, 0.01, dict.fromkeys(("machine", "versions", "commit", "date"), "here"))


def reference_rows(finished: Finished) -> list[dict[str, Any]]:
    return [row for row in finished.result["rows"] if row["implementation"] == "reference"]


def test_bench_measures_every_figure_of_three_passes(quick_bench: Finished) -> None:
    assert quick_bench.code == 0, quick_bench.errors
    rows = reference_rows(quick_bench)
    assert [row["pass"] for row in rows] == ["forward", "backward", "full"]
    assert [(row["pass"], name) for row in rows for name in FIGURES if row[name] is None] == []
    assert [(row["pass"], name) for row in rows for name in WHERE if not row[name]] == []
    assert {row["graph_reason"] for row in rows} == {"there are no CUDA graphs on cpu"}
    assert {row["axis"] for row in quick_bench.result["rows"]} == {None}


def test_dispatch_is_a_row_of_its_own_with_the_cost_to_the_host(quick_bench: Finished) -> None:
    (row,) = [row for row in quick_bench.result["rows"] if row["pass"] == "dispatch"]
    assert 0 < row["enqueue_ms"] < 1


def test_share_is_least_time_over_median_where_the_work_is_known(quick_bench: Finished) -> None:
    forward, backward, full = reference_rows(quick_bench)
    assert backward["limit_ms"] is backward["share"] is None
    for row, tensors in ((forward, 3), (full, 8)):
        size = tensors * 512 * 1024 * 4
        assert row["limit_ms"] == pytest.approx(size / row["copy_bytes_per_second"] * 1e3)
        assert row["share"] == pytest.approx(row["limit_ms"] / row["median_ms"])
        # Measured, and so not the very same as the bytes at the bandwidth.
        assert 0 < row["copy_ms"] != row["limit_ms"]


def test_the_peak_of_forward_is_activation_and_result_and_gradients_that_are_returned_count_apart(
    quick_bench: Finished,
) -> None:
    forward, _, full = reference_rows(quick_bench)
    assert forward["peak_extra_bytes"] == 2 * 512 * 1024 * 4
    assert full["peak_extra_bytes"] - full["peak_beyond_gradients_bytes"] == 2 * 512 * 1024 * 4


def test_float32_error_is_a_rounding_but_not_zero(quick_bench: Finished) -> None:
    for row in reference_rows(quick_bench):
        assert 0 < row["error_outputs"] < 1e-6
        assert 0 < row["error_gradients"] < 1e-6


def test_every_file_has_the_rows_of_both_runs(quick_bench: Finished) -> None:
    rows = json.loads((quick_bench.folder / "results.json").read_text())
    assert rows[len(rows) // 2 :] == quick_bench.result["rows"]
    for name in ("rows.csv", "results.csv"):
        lines = list(csv.reader((quick_bench.folder / name).open(newline="")))
        assert sum(line[0] == "op" for line in lines) == 1
        assert len(lines) == 1 + len(rows)


QUICK = ("--quick", "--device", "cpu", "--seconds", "0.001", "--pass", "forward", "--json")


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "results.json").read_text()))


def test_resuming_measures_only_what_is_missing(liger: InProcess, tmp_path: Path) -> None:
    liger("bench", "swiglu", *QUICK, "--out", str(tmp_path))
    before = rows_in(tmp_path)
    liger("bench", "swiglu", "geglu", *QUICK, "--peer", "eager", "--out", str(tmp_path), "--resume")
    added = rows_in(tmp_path)[len(before) :]
    assert [(row["op"], row["implementation"]) for row in before] == [("swiglu", "reference")]
    wanted = [("swiglu", "eager"), ("geglu", "reference"), ("geglu", "eager")]
    assert [(row["op"], row["implementation"]) for row in added] == wanted


def test_resuming_elsewhere_measures_all_again(liger: InProcess, tmp_path: Path) -> None:
    liger("bench", "swiglu", *QUICK, "--out", str(tmp_path))
    (row,) = rows_in(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps([row | {name: "another"} for name in ENVIRONMENT]))
    liger("bench", "swiglu", *QUICK, "--out", str(tmp_path), "--resume")
    assert len(rows_in(tmp_path)) == len(ENVIRONMENT) + 1


def test_scaling_measures_the_points_of_a_series(liger: InProcess, tmp_path: Path) -> None:
    liger(*f"bench scaling rms_norm --quick --device cpu --seconds 0.001 --json --out {tmp_path}".split())
    rows = rows_in(tmp_path)
    points = {w.axis for w in rms_norm.workloads() if w.quick and w.axis}
    assert {(row["axis"], row["axis_value"]) for row in rows} == points
    assert {row["pass"] for row in rows} == {"full"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--quik", "--quick"),
        ("swiglu --workload 3x3*", "bench: something must be left to measure, got no workload for 3x3*"),
        ("swiglu --pass sideways", "--pass must be one of forward, backward, full, evaluation, dispatch, got 'sidew"),
        ("rms_nrom --quick", "bench: OP must be one of ; got 'rms_nrom'. Did you mean 'rms_norm'?"),
        ("swiglu --quick --backend refrence", "Did you mean 'reference'?"),
        ("swiglu --quick --peer eagre", "bench: --peer must be one of eager, ; got 'eagre'. Did you mean 'eager'?"),
        ("swiglu --resume", "bench: --resume needs --out, the folder of the run to resume"),
    ],
)
def test_a_wrong_word_ends_with_2_and_what_is_right(words: str, sentence: str, liger: InProcess) -> None:
    code, errors = liger("bench", *words.split())
    assert code == 2
    assert [part for part in sentence.split("; ") if part not in errors] == []


def test_inputs_that_do_not_fit_are_a_reason_for_every_implementation() -> None:
    def make(device: torch.device, dtype: torch.dtype) -> Any:
        raise torch.OutOfMemoryError("no 3 PiB left")

    (row,) = RUN.measured(swiglu, Workload("huge", make), [backend(swiglu, "reference")], lambda _: None)
    assert (row.reason, row.failed) == ("out of memory for the inputs: no 3 PiB left", False)


def test_a_csv_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(OptionError, match="must have the columns of this version"):
        Files("results", HEADER, csv=path).append([])
    assert path.read_text() == "a,b\n1,2\n"


def test_arguments_frozen_in_every_sample_get_no_gradient() -> None:
    assert {"cos", "sin"} <= constants(rope)
    assert not {"q", "k"} & constants(rope)


@pytest.fixture
def with_backends(fresh_selection: None) -> Iterator[None]:
    """Two more backends: one declines every call, the other has a bug."""

    def declines(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        raise Unsupported("it takes no Tuesday tensors")

    def fails(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        raise ZeroDivisionError("one over nothing")

    found = registry()
    for name, implementation in (("declining", declines), ("failing", fails)):
        found.backends[name] = Backend(name, ("cpu",), 1, {swiglu: implementation})
        found.implementations[name] = {"swiglu": implementation}
    yield
    selection.reset()


def measured(implementation: str) -> list[OpRow]:
    case = make_case(swiglu, next(w for w in swiglu.workloads() if w.quick), CPU, torch.float32)
    case.set_exact()
    return RUN.rows(case, [backend(swiglu, implementation)])


@pytest.mark.usefixtures("with_backends")
def test_a_backend_that_declines_gives_a_row_with_the_reason() -> None:
    (row,) = measured("declining")
    assert "it takes no Tuesday tensors" in row.reason
    assert row.median_ms is None
    assert not row.failed


@pytest.mark.usefixtures("with_backends")
def test_a_backend_that_fails_counts_as_failed_and_leaves_the_selection_as_it_was() -> None:
    before = selection.selected(swiglu)
    (row,) = measured("failing")
    assert row.reason == "ZeroDivisionError: one over nothing"
    assert row.failed
    assert selection.selected(swiglu) == before
