# SPDX-License-Identifier: Apache-2.0
"""`liger bench model`: one row per implementation and shape, whatever becomes of its process."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bench.commands import START, Finished, InProcess, run_liger
from liger_bench.memory import bytes_of
from liger_bench.model.command import SHAPES
from liger_bench.model.implementations import IMPLEMENTATIONS
from liger_bench.model.job import Job, Row
from liger_bench.model.run import answer, measured
from liger_bench.model.training import BUSY, Training
from liger_bench.process import DONE, FAILED, READY, Answer, Process, failure
from liger_core import OptionError

WHERE = {"machine": "m", "versions": "v", "commit": "c", "date": "d"}
FIGURES = (
    "tokens_per_second",
    "low_tokens_per_second",
    "high_tokens_per_second",
    "step_seconds",
    "steps",
    "peak_bytes",
    "loss",
    "grad_norm",
    "compile_seconds",
    "parameters",
)


def job(
    implementation: str = "hf",
    batch: int = 2,
    sequence: int = 16,
    dtype: str = "float32",
    steps: int = 1,
    kernels: int = 0,
) -> Job:
    return Job("tiny", batch, sequence, implementation, "cpu", dtype, None, steps, 0.0, kernels)


RESUMED = f"""
import sys
try:
    {START}
except SystemExit:
    print("BETWEEN")
    sys.argv += ["--implementation", "liger-kernel", "--resume"]
    main()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two implementations of a tiny model, and then three: the first two have been measured by then."""
    folder = tmp_path_factory.mktemp("model")
    command = (
        "bench",
        "model",
        "--device",
        "cpu",
        "--shape",
        "2x16",
        "--steps",
        "4",
        "--seconds",
        "0",
        "--together",
        "2",
        "--json",
    )
    done = run_liger(
        *command, "--out", str(folder), "--implementation", "hf", "--implementation", "liger", start=RESUMED
    )
    first, _, second = done.stdout.partition("BETWEEN")
    (folder / "first.json").write_text(first)
    return Finished(done.returncode, second, done.stderr, folder)


def rows(finished: Finished) -> dict[str, dict[str, Any]]:
    return {row["implementation"]: row for row in finished.result["rows"]}


def test_it_ends_well(finished: Finished) -> None:
    assert finished.code == 0, finished.errors


@pytest.mark.parametrize("figure", FIGURES)
def test_every_row_carries(finished: Finished, figure: str) -> None:
    assert rows(finished)["hf"][figure] is not None
    assert rows(finished)["liger"][figure] is not None


def test_speed_is_tokens_over_the_time_of_a_step(finished: Finished) -> None:
    row = rows(finished)["hf"]
    assert row["tokens_per_second"] == pytest.approx(2 * 16 / row["step_seconds"])
    assert row["low_tokens_per_second"] <= row["tokens_per_second"] <= row["high_tokens_per_second"]


def test_three_steps_are_timed_although_they_take_longer(finished: Finished) -> None:
    assert rows(finished)["hf"]["steps"] == 3


def test_implementations_start_from_the_same_weights_and_tokens(finished: Finished) -> None:
    plain, liger = rows(finished)["hf"], rows(finished)["liger"]
    assert liger["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert liger["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


def test_peak_counts_weights_and_gradients(finished: Finished) -> None:
    for name in ("hf", "liger"):
        row = rows(finished)[name]
        assert row["peak_bytes"] >= 2 * 4 * row["parameters"]


def test_a_row_says_what_runs_the_ops(finished: Finished) -> None:
    assert rows(finished)["hf"]["backend"] == ""
    assert rows(finished)["liger"]["backend"] == "reference"


def test_what_cannot_run_here_is_a_row_with_the_reason(finished: Finished) -> None:
    row = rows(finished)["liger-kernel"]
    assert row["reason"] == "runs on cuda only"
    assert row["tokens_per_second"] is None
    assert not row["failed"]


def test_a_resumed_run_measures_only_what_is_new(finished: Finished) -> None:
    before = json.loads((finished.folder / "first.json").read_text())["rows"]
    assert finished.result["rows"][:2] == before
    with (finished.folder / "model.csv").open(newline="") as file:
        names = [line["implementation"] for line in csv.DictReader(file)]
    assert names == ["hf", "liger", "liger-kernel"]
    assert json.loads((finished.folder / "model.json").read_text()) == finished.result["rows"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB. Of it"),
            "Tried to allocate 2 GiB. GPU 0 has 1 GiB",
        ),
        (
            RuntimeError(
                "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 9 GiB of which 7 GiB is free. It uses 2 GiB. "
                "3.00 GiB allowed; Of"
            ),
            "Tried to allocate 2 GiB. 3.00 GiB allowed",
        ),
        (RuntimeError("CUDA error: out of memory\nmore"), "CUDA error: out of memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        ),
        (MemoryError(), "of the host"),
    ],
    ids=["pytorch", "limited", "cuda", "cublas", "host"],
)
def test_out_of_memory_is_recognized_in_the_words_of_every_library(error: Exception, reason: str) -> None:
    state, results = failure(error)
    assert (state, results["out_of_memory"]) == (FAILED, True)
    assert results["reason"].startswith(f"out of memory: {reason}")


def test_running_out_of_memory_is_not_a_failure() -> None:
    state, results = answer_of(job(batch=10**7, sequence=10**6))
    assert state == FAILED
    assert results["out_of_memory"]
    assert results["reason"].startswith("out of memory: ")
    assert "failed" not in results


def test_an_error_is_a_failure_with_its_reason_and_where_it_was_raised(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer_of(job(dtype="float12")) == (FAILED, {"reason": "KeyError: 'float12'", "failed": True})
    assert "Traceback" in capsys.readouterr().err


def answer_of(job: Job) -> Answer:
    """What a process answers, asked in this one."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        return answer(job, theirs)


class Crowded:
    """Stands in for a process that finds too little memory while another one has some."""

    alive: ClassVar[int] = 0
    peers: ClassVar[list[int]] = []

    def __init__(self, job: Job, *_: Any) -> None:
        self.job = job
        Crowded.alive += 1
        self.answered: Answer = (READY, {})

    def wait(self) -> None:
        Crowded.peers.append(Crowded.alive)
        self.ran_out_of_memory = self.job.batch > 1 and Crowded.alive > 1
        out: Answer = (FAILED, {"reason": "out of memory", "out_of_memory": True})
        self.answered = out if self.ran_out_of_memory else (DONE, {"figures": {"loss": 1.0}, "kernels": []})

    def measure(self) -> None: ...

    def end(self) -> None: ...

    def kill(self) -> None:
        Crowded.alive -= 1


def test_a_job_that_ran_out_of_memory_among_others_is_repeated_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liger_bench.model.run.Process", Crowded)
    monkeypatch.setattr(Crowded, "peers", [])
    found = [m.row for m in measured([job(batch=2), job("liger", batch=2)], WHERE, 2)]
    assert [(row.implementation, row.reason) for row in found] == [("hf", ""), ("liger", "")]
    assert Crowded.peers == [2, 2, 1, 1]


def test_processes_of_different_shapes_are_not_prepared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liger_bench.model.run.Process", Crowded)
    monkeypatch.setattr(Crowded, "peers", [])
    jobs = [job(name, batch=batch) for batch in (1, 2) for name in ("hf", "hf-compiled", "liger")]
    assert len(list(measured(jobs[:3], WHERE, 2))) == 3
    assert Crowded.peers == [2, 2, 1]
    monkeypatch.setattr(Crowded, "peers", [])
    assert len(list(measured([jobs[0], jobs[3]], WHERE, 2))) == 2
    assert Crowded.peers == [1, 1]


def test_an_interrupted_run_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liger_bench.model.run.Process", Crowded)
    results = measured([job(batch=1), job(batch=1)], WHERE, 2)
    next(results)
    assert Crowded.alive == 2
    results.close()
    assert Crowded.alive == 0


def test_a_killed_process_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    process = Process(job(), tmp_path / "log", 60, answer)
    assert process.process.pid is not None
    os.kill(process.process.pid, signal.SIGKILL)
    state, results = process.wait()
    process.end()
    assert state == FAILED
    assert results["reason"] == "the process died: SIGKILL, as when the host is out of memory"
    assert results["failed"]


def test_a_process_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    process = Process(job(), tmp_path / "log", 0.0, answer)
    state, results = process.wait()
    process.end()
    assert (state, results["reason"]) == (FAILED, "no answer in 0 s")
    assert not process.process.is_alive()


def test_a_process_waits_for_a_signal_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []

    class Connection:
        def send(self, answer: Answer) -> None:
            happened.append(answer[0])

        def recv(self) -> None:
            happened.append("signal")

    def measure(training: Training) -> dict[str, Any]:
        happened.append("measured")
        return {}

    monkeypatch.setattr(Training, "measure", measure)
    last: Any = answer(job(), Connection())  # type: ignore[arg-type]
    assert [*happened, last[0]] == [READY, "signal", "measured", DONE]


@pytest.mark.parametrize("implementation", ["hf-compiled", "liger-compiled"])
def test_compiled_implementations_are_compiled(implementation: str) -> None:
    assert Training(job(implementation)).model._compiled_call_impl is not None


def test_the_longest_operations_of_a_step_are_listed() -> None:
    training = Training(job())
    found = training.kernels(3)
    times = [kernel["ms"] for kernel in found[:-1]]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)
    assert found[-1]["name"] == BUSY
    assert found[-1]["ms"] >= sum(times)
    training.prepare()
    assert training.first["loss"] > 0


@pytest.mark.parametrize("model", SHAPES)
def test_shapes_go_from_small_to_large(model: str) -> None:
    assert SHAPES[model] == sorted(SHAPES[model])


def test_every_implementation_of_the_peers_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert IMPLEMENTATIONS["liger-kernel"].missing("cuda") == "not installed; pip install liger-kernel"
    assert IMPLEMENTATIONS["liger"].missing("cuda") is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--implementation", "ligr"),
            "must be one of hf, hf-compiled, liger-kernel, liger, liger-compiled, got 'ligr'. Did you mean 'liger'?",
        ),
        (
            ("--model", "7b"),
            (
                "bench model: --model must be one of tiny, small, llama-3.2-1b, llama-3-8b, qwen2-7b, gemma-7b, "
                "mistral-7b, phi-3-mini, got '7b'"
            ),
        ),
        (
            ("--shape", "8,1024"),
            "bench model: --shape must be batch x sequence like 8x1024, with at least two tokens, got '8,1024'",
        ),
        (
            ("--memory-limit", "24 apples"),
            "bench model: --memory-limit must be a size like 24GiB or 512MB, got '24 apples'",
        ),
        (("--resume",), "bench model: --resume needs --out, the folder of the run to resume"),
        (("--memory-limit", "24GiB"), "bench model: --memory-limit needs a GPU, got --device cpu"),
    ],
)
def test_wrong_usage_ends_with_2(liger: InProcess, arguments: tuple[str, ...], sentence: str) -> None:
    code, errors = liger("bench", "model", "--device", "cpu", *arguments)
    assert code == 2
    assert sentence in errors


def test_a_results_file_of_another_kind_is_left_alone(liger: InProcess, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{")
    code, errors = liger("bench", "model", "--device", "cpu", "--out", str(tmp_path))
    assert code == 2
    assert "must be JSON" in errors
    assert (tmp_path / "model.json").read_text() == "{"


@pytest.mark.parametrize(
    ("size", "count"), [("24GiB", 24 << 30), ("1.5 kb", 1500), ("1e9b", 10**9), ("7 B", 7), ("2g", 2 * 10**9)]
)
def test_a_size_is_read(size: str, count: int) -> None:
    assert bytes_of("op: --size", size) == count


def test_a_size_without_a_unit_is_an_error_that_suggests_one() -> None:
    with pytest.raises(
        OptionError, match=r"op: --size must be a size like 24GiB or 512MB, got '24', which needs a unit: 24GiB\?"
    ):
        bytes_of("op: --size", "24")


@pytest.mark.parametrize(
    "size", ["", "0", "0 GiB", "GiB", "-1", "-1GiB", "1 PiB", "1..5GiB", "nan", "infGiB", "1e99GiB", "9e18B"]
)
def test_no_size_is_refused(size: str) -> None:
    with pytest.raises(OptionError, match="op: --size must be a size like"):
        bytes_of("op: --size", size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_memory_limit_runs_out() -> None:
    limited = Job("small", 64, 1024, "hf", "cuda", "bfloat16", 1 << 30, 1, 0.0)
    ((row),) = [m.row for m in measured([limited], WHERE, 1)]
    assert isinstance(row, Row)
    assert row.out_of_memory, row.reason
