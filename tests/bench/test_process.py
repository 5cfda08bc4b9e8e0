# SPDX-License-Identifier: Apache-2.0
"""Processes that measure: what becomes of one that fails, dies or hangs, and in which order several ranks answer."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from liger_bench.process import DONE, FAILED, Answer, Process, failure
from liger_bench.sharded.run import answers_of


def answer(job: Any, connection: Connection) -> Answer:
    connection.recv()
    return DONE, {}


def test_a_killed_process_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    process = Process(None, tmp_path / "log", 60, answer)
    os.kill(process.process.pid, signal.SIGKILL)
    state, results = process.wait()
    process.end()
    assert state == FAILED
    assert results["reason"] == "the process died: SIGKILL, as when the host is out of memory"
    assert results["failed"]


def test_a_process_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    process = Process(None, tmp_path / "log", 0.0, answer)
    state, results = process.wait()
    process.end()
    assert (state, results["reason"]) == (FAILED, "no answer in 0 s")
    assert not process.process.is_alive()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB. Of it"), "Tried to allocate 2 GiB. GPU 0 has 1 GiB"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 9 GiB of which 7 GiB is free. It uses 2 GiB. 3.00 GiB allowed; Of"), "Tried to allocate 2 GiB. 3.00 GiB allowed"),
        (RuntimeError("CUDA error: out of memory\nmore"), "CUDA error: out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
        (MemoryError(), "of the host"),
    ],
    ids=["pytorch", "limited", "cuda", "cublas", "host"],
)  # fmt: skip
def test_out_of_memory_is_recognized_in_the_words_of_every_library(error: Exception, reason: str) -> None:
    state, results = failure(error)
    assert (state, results["out_of_memory"]) == (FAILED, True)
    assert results["reason"].startswith(f"out of memory: {reason}")


def test_an_error_is_a_failure_with_its_reason_and_where_it_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError) as raised:
        {}["float12"]
    assert failure(raised.value) == (FAILED, {"reason": "KeyError: 'float12'", "failed": True})
    assert "Traceback" in capsys.readouterr().err


class Silent:
    """Stands in for a rank that waits for another one."""

    def __init__(self, answers: list[Answer]) -> None:
        self.connection, self.other = multiprocessing.Pipe()
        for answer in answers:
            self.other.send(answer)

    def wait(self) -> Answer:
        return self.connection.recv()  # type: ignore[no-any-return]


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
