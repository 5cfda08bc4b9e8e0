# SPDX-License-Identifier: Apache-2.0
"""`liger bench distributed`: training runs on several ranks, with and without Liger, also if one of them fails."""

from __future__ import annotations

import csv
import json
import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.commands import START, Finished, InProcess, run_liger
from liger_bench.distributed.job import IMPLEMENTATIONS, LIGER, PLAIN, REORDERED, Job, Row, together
from liger_bench.distributed.run import measured
from liger_bench.distributed.strategies import STRATEGIES, Strategy
from liger_bench.process import DONE, FAILED, Answer
from liger_bench.ranks import answers_of
from liger_bench.row import row_from

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)

WHERE = {"machine": "m", "versions": "v", "commit": "c", "date": "d"}
JOB = Job("tiny", 1, 16, "ddp", PLAIN, 2, "cpu", "float32", 3, 1e-3)
TWICE = f"""
import sys
try:
    {START}
except SystemExit as ended:
    print("BETWEEN")
    sys.argv += ["--resume"]
    main()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Tiny runs on two ranks, and then the same command again."""
    folder = tmp_path_factory.mktemp("distributed")
    command = (
        "bench",
        "distributed",
        "--device",
        "cpu",
        "--batch",
        "1",
        "--sequence",
        "16",
        "--steps",
        "3",
        "--strategy",
        "fsdp2",
        "--json",
    )
    done = run_liger(*command, "--out", str(folder), start=TWICE)
    first, _, second = done.stdout.partition("BETWEEN")
    (folder / "first.json").write_text(first)
    return Finished(done.returncode, second, done.stderr, folder)


def rows(finished: Finished) -> dict[str, dict[str, Any]]:
    return {row["implementation"]: row for row in finished.result["rows"]}


@pytest.mark.slow
def test_liger_trains_to_the_losses_of_the_baseline(finished: Finished) -> None:
    assert finished.code == 0, finished.errors
    assert tuple(rows(finished)) == IMPLEMENTATIONS
    plain, liger = rows(finished)[PLAIN], rows(finished)[LIGER]
    assert len(plain["losses"]) == 3
    assert plain["losses"][-1] < plain["losses"][0] - 0.05
    assert liger["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert liger["backend"] == "reference"
    assert (liger["loss_bound"], liger["agrees"]) == (1e-3, True)


@pytest.mark.slow
def test_a_resumed_run_measures_nothing_twice(finished: Finished) -> None:
    before = json.loads((finished.folder / "first.json").read_text())["rows"]
    assert finished.result["rows"] == before
    assert json.loads((finished.folder / "distributed.json").read_text()) == before
    with (finished.folder / "distributed.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["implementation"] for line in lines] == list(IMPLEMENTATIONS)
    assert [float(loss) for loss in lines[0]["losses"].split()] == before[0]["losses"]


@pytest.mark.slow
def test_a_failed_run_is_a_row_with_its_reason_and_the_others_continue() -> None:
    jobs = [replace(JOB, ranks=1, dtype="float12"), replace(JOB, ranks=1)]
    failed, fine = measured(jobs, WHERE, 300)
    assert (failed.row.failed, failed.row.reason) == (True, "KeyError: 'float12'")
    assert "Traceback" in failed.written
    assert fine.row.tokens_per_second is not None


def test_a_strategy_that_is_not_installed_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "zero3", Strategy(STRATEGIES["zero3"].trained, module="no_such_module"))
    ((found),) = measured([replace(JOB, strategy="zero3")], WHERE, 300)
    assert (found.row.reason, found.row.failed) == ("not installed; pip install no_such_module", False)


class Silent:
    """Stands in for a rank that waits for another one."""

    def __init__(self, answers: list[Answer]) -> None:
        self.connection, self.other = multiprocessing.Pipe()
        for answer in answers:
            self.other.send(answer)

    def wait(self) -> Answer:
        connection: Connection = self.connection
        answer: Answer = connection.recv()
        return answer


def test_one_rank_that_fails_is_not_waited_for_by_the_others() -> None:
    ranks: list[Any] = [Silent([]), Silent([(FAILED, {"reason": "broken"})])]
    start = time.monotonic()
    assert answers_of(ranks, 300) == [(FAILED, {"reason": "broken"})]
    assert time.monotonic() - start < 30


def test_ranks_that_do_not_answer_are_given_up() -> None:
    ranks: list[Any] = [Silent([(DONE, {})]), Silent([])]
    assert answers_of(ranks, 0) == [(FAILED, {"reason": "1 of 2 ranks gave no answer in 0 s", "failed": True})]


def test_answers_come_in_the_order_of_the_ranks() -> None:
    ranks: list[Any] = [Silent([(DONE, {"rank": rank})]) for rank in range(3)]
    assert [results["rank"] for _, results in answers_of(ranks, 300)] == [0, 1, 2]


def of_rank(losses: list[float], seconds: list[float], peak: int | None = None) -> dict[str, Any]:
    return {"losses": losses, "seconds": seconds, "peak_bytes": peak, "backend": "", "parameters": 1}


def test_the_slowest_rank_and_the_fullest_one_count() -> None:
    ranks = [of_rank([4.0, 3.0, 2.0], [9.0, 9.0, 0.5], 100), of_rank([2.0, 1.0, 0.0], [9.0, 9.0, 2.0], 300)]
    results = together(JOB, ranks, [])
    assert results["tokens_per_second"] == 2 * 16 / 2.0
    assert (results["peak_bytes"], results["peak_bytes_by_rank"]) == (300, [100, 300])
    assert results["losses"] == [3.0, 2.0, 1.0]


def measured_row(implementation: str, losses: list[float], dtype: str, before: list[Row]) -> Row:
    job = replace(JOB, implementation=implementation, dtype=dtype)
    return row_from(Row, job, WHERE, together(job, [of_rank(losses, [1.0] * 3)] * 2, before))


@pytest.mark.parametrize(
    ("dtype", "difference", "bound", "agrees"),
    [
        ("bfloat16", 0.29, 0.3, True),
        ("bfloat16", 0.31, 0.3, False),
        ("float32", 9e-4, 1e-3, True),
        ("float32", 2e-3, 1e-3, False),
    ],
)
def test_liger_may_differ_by_thrice_what_reordered_sums_do(
    dtype: str, difference: float, bound: float, agrees: bool
) -> None:
    plain = measured_row(PLAIN, [3.0, 2.0, 1.0], dtype, [])
    reordered = measured_row(REORDERED, [3.0, 2.1, 1.0], dtype, [plain])
    liger = measured_row(LIGER, [3.0, 2.0, 1.0 + difference], dtype, [plain, reordered])
    assert (plain.loss_difference, plain.agrees) == (None, None)
    assert (reordered.loss_difference, reordered.agrees) == (pytest.approx(0.1), None)
    assert (liger.loss_difference, liger.loss_bound) == (pytest.approx(difference), pytest.approx(bound))
    assert liger.agrees is agrees


def test_a_loss_that_is_not_a_number_is_a_failure_that_json_can_represent() -> None:
    row = measured_row(
        LIGER, [3.0, float("nan"), 1.0], "float32", [measured_row(PLAIN, [3.0, 2.0, 1.0], "float32", [])]
    )
    assert (row.failed, row.agrees, row.reason) == (True, False, "a loss is not finite")
    assert json.loads(json.dumps(row.columns(), allow_nan=False))["losses"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--strategy", "zer3"),
            "--strategy must be one of fsdp2, ddp, zero0, zero1, zero2, zero3, got 'zer3'. Did you mean 'zero3'?",
        ),
        (
            ("--model", "7b"),
            (
                "bench distributed: --model must be one of tiny, small, llama-3.2-1b, llama-3-8b, qwen2-7b, gemma-7b, "
                "mistral-7b, phi-3-mini, got '7b'"
            ),
        ),
        (("--dtype", "float16"), "bench distributed: --dtype must be float32 or bfloat16, got 'float16'"),
        (("--resume",), "bench distributed: --resume needs --out, the folder of the run to resume"),
    ],
)
def test_wrong_usage_ends_with_2(liger: InProcess, arguments: tuple[str, ...], sentence: str) -> None:
    code, errors = liger("bench", "distributed", "--device", "cpu", *arguments)
    assert code == 2
    assert sentence in errors


def test_a_results_file_of_another_kind_is_left_alone(liger: InProcess, tmp_path: Path) -> None:
    (tmp_path / "distributed.json").write_text("{")
    code, errors = liger("bench", "distributed", "--device", "cpu", "--out", str(tmp_path))
    assert code == 2
    assert "must be JSON" in errors
    assert (tmp_path / "distributed.json").read_text() == "{"
