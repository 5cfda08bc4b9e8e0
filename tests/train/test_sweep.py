# SPDX-License-Identifier: Apache-2.0
"""`liger train --sweep`: each run in a fresh process, whatever happens to the others."""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bench.commands import InProcess, assert_refused, cells
from liger_bench.row import Measurement
from liger_core.errors import OptionError
from liger_train.implementations import IMPLEMENTATIONS
from liger_train.model import build
from liger_train.options import RunOptions
from liger_train.plan.step import predict
from liger_train.row import NOT_RUN, SETUP, row_of
from liger_train.runs import launch, sweep
from liger_train.runs.launch import variables
from liger_train.setup import Setup
from liger_train.sweep_runs import reason_to_skip, setups_of, strategies_of, swept_values
from train import answers
from train.answers import BROKEN, KILLED, LATE, OUT_OF_MEMORY, WHERE

TINY = Setup("tiny", device="cpu", precision="fp32", checkpoint="none")


def setups(*batches: int) -> list[Setup]:
    return setups_of(TINY, {"batch": batches}, ["all"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that only do what their batch says."""
    monkeypatch.setattr(launch, "command", lambda setup: [sys.executable, answers.__file__, str(setup.batch)])


def test_whatever_happens_to_a_run_the_others_continue(quick: None) -> None:
    done, killed, broken, full = sweep.run_all(setups(1, KILLED, BROKEN, OUT_OF_MEMORY), WHERE)
    assert (killed.row.failed, "SIGKILL" in killed.row.reason) == (True, True)
    assert broken.row.reason == "the process died: exit code 1; it wrote: ValueError: no such layer"
    assert "Traceback" in broken.written
    assert (full.row.out_of_memory, full.row.failed) == (True, False)
    assert done.row.tokens_per_second == 10.0


def test_a_run_that_hangs_is_killed(quick: None) -> None:
    (found,) = sweep.run_all(setups(LATE), WHERE, timeout=1.0)
    assert (found.row.failed, found.row.reason) == (True, "timed out after 1 s")


def test_each_gpu_has_one_process_at_a_time_and_a_share_of_the_processors(quick: None) -> None:
    rows = [found.row for found in sweep.run_all(setups(1, 2, 3), WHERE, gpus=[0, 1])]
    assert len({row.notes[0] for row in rows if row.notes}) == 3
    share = str(max(1, (os.cpu_count() or 1) // 2))
    answers = [(row.notes or [])[1:] for row in rows]
    assert {(gpu, processors) for gpu, processors, *_ in answers} == {("0", share), ("1", share)}
    for number in ("0", "1"):
        times = sorted((float(begun), float(ended)) for gpu, _, begun, ended in answers if gpu == number)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))


def test_a_sweep_that_is_left_ends_its_runs(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[launch.RunProcess] = []

    class Seen(launch.RunProcess):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            begun.append(self)

    monkeypatch.setattr(sweep, "RunProcess", Seen)
    rows = sweep.run_all(setups(1, LATE), WHERE, gpus=[0, 1])
    next(rows)
    rows.close()
    assert [run.process.poll() for run in begun] == [0, -signal.SIGKILL]


def test_a_gpu_is_one_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert variables([1], 1) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert variables([0, 1], 1) == {"CUDA_VISIBLE_DEVICES": "4,6"}


def test_runs_larger_than_one_that_ran_out_of_memory_can_be_skipped() -> None:
    before = [row_of(TINY, WHERE, {"out_of_memory": True})]
    results = sweep.run_all(setups(2, 3), WHERE, options=RunOptions(skip_larger=True), earlier=before)
    found = [result.row for result in results]
    assert [row.reason for row in found] == [f"{NOT_RUN}, since 1 × 1024 ran out of memory"] * 2
    assert not any(row.out_of_memory or row.failed for row in found)


@pytest.mark.parametrize("other", [{"liger": "none"}, {"sequence": 512}, {"checkpoint": "full"}, {"memory_limit": 1}])
def test_smaller_and_other_runs_are_not_skipped(other: dict[str, Any]) -> None:
    assert reason_to_skip(setups_of(TINY, {"batch": [2]}, ["all"])[0], [row_of(TINY, WHERE, {"out_of_memory": True})])
    changed = replace(TINY, **({"batch": 2} | other))
    assert reason_to_skip(changed, [row_of(TINY, WHERE, {"out_of_memory": True})]) == ""


def test_several_sweeps_give_every_combination_small_ones_first() -> None:
    found = setups_of(TINY, swept_values(["batch=4,1", "checkpoint=none,full"]), strategies_of("none,rms_norm+rope"))
    assert [(each.batch, each.checkpoint, each.liger) for each in found] == [
        (batch, checkpoint, liger)
        for batch in (1, 4)
        for checkpoint in ("none", "full")
        for liger in ("none", "rms_norm,rope")
    ]


def test_a_sweep_over_implementations_sets_what_replaces_the_ops_and_what_compiles() -> None:
    found = setups_of(TINY, swept_values([f"implementation={','.join(IMPLEMENTATIONS)}", "batch=2,1"]), ["none", "all"])
    assert [(each.batch, each.implementation) for each in found] == [(n, i) for n in (1, 2) for i in IMPLEMENTATIONS]
    assert {(each.liger, each.compile) for each in found} == {
        *((liger, compiled) for liger in ("none", "all") for compiled in ("none", "default")),
        ("liger-kernel", "none"),
    }
    assert replace(TINY, liger="rms_norm", compile="graphs").implementation == "liger-compiled"


def test_a_table_of_implementations_names_them_and_compares_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    setups = setups_of(TINY, {"implementation": ["hf", "liger", "liger-kernel"]}, ["all"])
    results: list[dict[str, Any]] = [{"tokens_per_second": 100.0}, {"tokens_per_second": 150.0}, {"reason": "no GPU"}]
    rows = [row_of(setup, WHERE, one) for setup, one in zip(setups, results, strict=True)]
    sweep.print_rows(rows, ["implementation"])
    printed = capsys.readouterr().out
    assert cells(printed, "1.50")[:3] == ["liger", "150", "1.50"]
    assert "liger-kernel: no GPU" in printed


def test_another_library_has_no_plan() -> None:
    with pytest.raises(OptionError, match="cannot run on fake tensors"):
        predict(Setup("tiny", liger="liger-kernel"))


def test_another_library_patches_the_model_below_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        patched: ClassVar[list[Any]] = []

        def _apply_liger_kernel_to_instance(self, model: Any) -> None:
            self.patched.append(model)

    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", Library())
    built = build(replace(TINY, liger="liger-kernel", adapter="lora"), torch.device("cpu"))
    assert (Library.patched, built.replaced) == ([built.model.get_base_model()], "")


def test_a_sweep_over_tensor_and_context_parallelism_starts_as_many_ranks_as_they_need() -> None:
    found = setups_of(TINY, swept_values(["tp=1,2", "cp=1,4"]), ["all"])
    assert [(each.tp, each.cp, each.ranks) for each in found] == [(1, 1, 1), (1, 4, 4), (2, 1, 2), (2, 4, 8)]
    assert [each.ranks for each in setups_of(TINY, swept_values(["tp=2", "ranks=4,8"]), ["all"])] == [4, 8]
    assert "--nproc-per-node 8" in found[-1].command()
    assert "--tp 2 --cp 4" in found[-1].command()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("sequence=512,1024", [512, 1024]), ("memory-limit=24GiB", [24 << 30]), ("learning-rate=1e-4", [1e-4]),
        ("optimizer=adamw,galore", ["adamw", "galore"]),
    ],
)  # fmt: skip
def test_values_have_the_type_of_their_option(option: str, value: list[Any]) -> None:
    assert list(swept_values([option]).values()) == [value]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["bach=1,2"], "must be an option and its values, for instance batch=1,4,8, got 'bach=1,2'. Did you mean 'batch'?"),
        (["batch"], "must be an option and its values"),
        (["batch=1,two"], "--sweep batch must have positive numbers, got 'two'"),
        (["batch=1", "batch=2"], "must name each option once, got batch twice"),
        (["liger=none,all"], "give --strategies"),
        (["implementation=hf,lieger"], "must name hf, hf-compiled, liger, liger-compiled, liger-kernel, got 'lieger'"),
    ],
)  # fmt: skip
def test_a_sweep_of_something_else_is_refused(options: list[str], sentence: str) -> None:
    with pytest.raises(OptionError) as raised:
        swept_values(options)
    assert sentence in str(raised.value)


def measured(asked: list[Setup], results: dict[str, Any]) -> Any:
    """Return runs that end at once, the second one with these results, and in whose third Ctrl-C is pressed."""

    def run_all(wanted: list[Setup], where: dict[str, str], started: Callable[[Setup], object], **_: Any) -> Any:
        for setup in wanted:
            asked.append(setup)
            started(setup)
            if len(asked) == 3:
                raise KeyboardInterrupt
            yield Measurement(row_of(setup, where, results if len(asked) == 2 else {"tokens_per_second": 1.0}))

    return run_all


@pytest.mark.parametrize(
    "results", [{"failed": True}, {"reason": f"{NOT_RUN}, since"}, {"tokens_per_second": 1.0, "interrupted": True}]
)
def test_a_resumed_sweep_runs_what_is_missing_or_has_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: dict[str, Any]
) -> None:
    asked: list[Setup] = []
    monkeypatch.setattr(sweep, "run_all", measured(asked, results))
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(TINY, RunOptions(sweeps=["batch=1,2,3"], strategies="all", out=tmp_path))
    assert "2/3 · tiny 3 × 1024 all · " in capsys.readouterr().err
    rows = sweep.sweep(TINY, RunOptions(sweeps=["batch=1,2,3,4"], strategies="all", out=tmp_path, resume=True))
    assert [setup.batch for setup in asked] == [1, 2, 3, 2, 3, 4]
    assert [row.batch for row in rows] == [1, 2, 3, 4]
    assert {row["batch"] for row in json.loads((tmp_path / "train.json").read_text())} == {1, 2, 3, 4}


def test_runs_that_have_to_settle_take_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Setup] = []
    monkeypatch.setattr(sweep, "run_all", measured(asked, {"tokens_per_second": 1.0}))
    # It wants a GPU.
    monkeypatch.setattr(sweep.techniques, "check", lambda setup: None)
    sweep.sweep(replace(TINY, steps=6), RunOptions(sweeps=["checkpoint=full,auto"], strategies="all"), settle=True)
    assert [(each.checkpoint, each.steps) for each in asked] == [("full", 6), ("auto", 6 + sweep.SETTLING)]


def test_a_run_is_not_compared_with_one_that_ran_out_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    full = row_of(replace(TINY, liger="none"), WHERE, {"out_of_memory": True, "peak_bytes": 2**30})
    done = row_of(replace(TINY, liger="all"), WHERE, {"tokens_per_second": 100.0, "peak_bytes": 2**29})
    sweep.print_rows([full, done], ["batch"])
    assert cells(capsys.readouterr().out, "all")[2:6] == ["100", "–", "0.50", "–"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sweep", "batch=1,2", "--liger", "rms_norm,rope"), "--liger cannot be combined with --sweep; give --strategies rms_norm+rope"),
        (("--sweep", "batch=1,2", "--output", "model"), "--output cannot be combined with --sweep"),
        (("--sweep", "batch=1,2", "--deterministic"), "--deterministic cannot be combined with --sweep"),
        (("--sweep", "batch=1,2", "--resume"), "--sweep with --resume needs --out"),
        (("--sweep", "batch=1,2", "--gpus", "0"), "--gpus needs GPUs, got --device cpu"),
        (("--gpus", "0"), "--gpus and --skip-larger are for --sweep"),
        (("--sweep", "implementation=hf", "--strategies", "all"), "both set --liger"),
        (("--sweep", "implementation=hf,liger-kernel"), "--liger liger-kernel needs --device cuda"),
        (("--profile",), "--snapshot and --profile need --out"),
        (("--strategies", ""), "--strategies must name values of --liger, for instance none,all, got ''"),
        (("--sweep", "learning-rate=1e-4,nan"), "--learning-rate must be a positive number, got nan"),
        (("--sweep", "memory-limit=24"), "--sweep memory_limit must be a size like 24GiB or 512MB, got '24', which needs a unit: 24GiB?"),
        (("--sweep", "batch=1", "--data", "no/such/file"), "--data must be a file, a folder, a dataset saved by datasets, or library"),
        (("--snapshot", "--profile", "--out", "results"), "need the same profiler on the CPU"),
        (("--sweep", "precision=fp32,fp17"), "fp17"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_combined_are_refused(
    liger: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(liger, sentence, "train", "--model", "tiny", "--device", "cpu", *arguments)
    assert not list(tmp_path.rglob("train.*"))


def test_a_sweep_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="cannot run under torchrun; give --sweep ranks=1,2,4"):
        sweep.sweep(TINY, RunOptions(sweeps=["batch=1"]))


@pytest.mark.slow
def test_a_run_is_started_as_a_user_starts_it() -> None:
    setup = replace(TINY, sequence=16, data=__file__, steps=3)
    (found,) = sweep.run_all([setup], WHERE)
    assert (found.row.reason, found.row.failed, len(found.row.losses or [])) == ("", False, 3), found.written
    assert all(getattr(found.row, name) == getattr(setup, name) for name in SETUP)
    assert not any(note.startswith("Defaults") for note in found.row.notes or [])


def test_a_run_of_a_sweep_starts_its_own_ranks() -> None:
    line = " ".join(launch.command(Setup("tiny", ranks=2, shard="zero2", batch=4)))
    assert "-m liger_core train --model tiny --batch 4" in line
    assert line.endswith(" --shard zero2 --ranks 2 --device cuda --liger all --precision bf16 --checkpoint full")


def test_recordings_of_a_run_are_in_the_folder_of_the_sweep(quick: None, tmp_path: Path) -> None:
    options = RunOptions(out=tmp_path / "results", snapshot=True)
    run = launch.RunProcess(TINY, options, tmp_path, [], 1, 60.0)
    run.process.wait()
    (run.out / "snapshots").mkdir()
    (run.out / "snapshots" / "tiny.json").touch()
    assert "--snapshot" in run.process.args  # type: ignore[operator]
    assert run.row(WHERE).row.tokens_per_second == 10.0
    assert (tmp_path / "results" / "snapshots" / "tiny.json").is_file()
