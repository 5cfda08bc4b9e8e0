# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, interrupted, or run out of something: what remains, and how they resume."""

import errno
import io
import json
import os
import platform
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import forks
from bench.commands import InProcess, assert_refused
from liger_core.errors import OptionError
from liger_train import techniques
from liger_train.row import COLUMNS, row_of
from liger_train.runs import command, saved_checkpoints
from liger_train.runs.run import run
from liger_train.setup import Setup
from train.training import At

pytestmark = pytest.mark.slow

WHERE = dict.fromkeys(("machine", "versions", "commit", "date"), "")
TINY = ("train", "--model", "tiny", "--device", "cpu")
# What the command does, but that it dies in the middle of its sixth step, as by kill -9, and hurries with its log.
KILLED = """
import os, signal, time
from transformers import TrainerCallback
from liger_bench import progress
from liger_train.runs import command
from liger_core.commands import main

class Killer(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 5:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

progress.NEXT_LINE = 0.01
command.observers = lambda setup, options, stack: [Killer()]
main()
"""


def raising(error: BaseException) -> Callable[..., None]:
    def do(*_: Any) -> None:
        raise error

    return do


def ctrl_c() -> None:
    # To this thread: of two signals to the process, which another thread may receive late, one would be lost.
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal; a background job, which may have started these tests, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(small: Setup) -> list[float]:
    """The losses of an uninterrupted run."""
    return run(small).losses or []


@pytest.fixture(scope="module")
def failed(small: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints, of a run that failed in its sixth step."""
    folder = tmp_path_factory.mktemp("failed")
    run(small, folder=folder, save_every=2, observers=[At(5, raising(RuntimeError("a cable was pulled")))])
    assert names(folder) == ["checkpoint-2", "checkpoint-4"]
    return folder


@pytest.fixture
def stopped(failed: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(failed, tmp_path / "saved")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != saved_checkpoints.LOCK)


def test_a_killed_run_resumes_with_the_losses_of_an_uninterrupted_one(
    liger: InProcess, small: Setup, whole: list[float], tmp_path: Path
) -> None:
    folders = f"--output {tmp_path / 'saved'} --save-every 2 --out {tmp_path / 'rows'}"
    arguments = f"{small.command()} {folders}".split()[1:]
    killed = forks.run(KILLED, *arguments)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert f"step 5/6 · loss {whole[4]:.4f} · " in killed.stderr
    assert liger(*arguments, "--resume")[0] == 0
    (row,) = json.loads((tmp_path / "rows" / "train.json").read_text())
    assert row["losses"] == whole
    assert row["notes"][-1] == f"Resumed from step 4, {tmp_path / 'saved' / 'checkpoint-4'}."


def test_sums_have_one_order_where_that_is_asked_for(small: Setup, whole: list[float]) -> None:
    seen: list[bool] = []
    note = lambda: seen.append(torch.are_deterministic_algorithms_enabled())  # noqa: E731
    row = run(small, deterministic=True, observers=[At(1, note)])
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert row.losses == whole
    assert [note for note in row.notes if note.startswith("--deterministic")]


def test_runs_on_one_disk_share_no_files_and_leave_none(
    small: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Path] = []

    def training_arguments(setup: Setup, *_: Any, **__: Any) -> Any:
        given.append(Path(setup.nvme_folder))
        (given[-1] / "weights").write_text("1 2 3")
        raise RuntimeError("this is enough")

    monkeypatch.setattr("liger_train.runs.run.training_arguments", training_arguments)
    # It wants a GPU.
    monkeypatch.setattr(techniques, "check", lambda setup: None)
    setup = replace(small, shard="zero3", offload="nvme", nvme_folder=str(tmp_path))
    rows = [run(setup) for _ in range(2)]
    assert [(row.reason, row.nvme_folder) for row in rows] == [("RuntimeError: this is enough", str(tmp_path))] * 2
    assert given[0].parent == given[1].parent == tmp_path
    assert given[0] != given[1]
    assert not names(tmp_path)


def test_without_an_intact_checkpoint_the_run_starts_from_scratch(
    small: Setup, whole: list[float], stopped: Path
) -> None:
    for path in saved_checkpoints.checkpoints(stopped):
        os.truncate(path / "optimizer.pt", 1000)
    row = run(small, folder=stopped, resume=True)
    assert row.losses == whole
    assert row.notes[-1] == f"There is no checkpoint in {stopped} to resume from; starting from scratch."


def test_a_run_does_not_resume_with_another_text(small: Setup, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(Path(small.data).read_text())
    now = replace(small, data=str(text))
    run(now, folder=tmp_path / "other")
    text.write_text("more" + text.read_text())
    with pytest.raises(OptionError, match=r"needs the text of the run in .*other, but it has changed"):
        run(now, folder=tmp_path / "other", resume=True)


def test_two_runs_do_not_write_to_one_folder(
    liger: InProcess, small: Setup, whole: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[tuple[int, str]] = []

    def second_run() -> None:
        with pytest.raises(OptionError, match="must be a folder that no other run is writing to"):
            run(replace(small, seed=1), folder=tmp_path)
        # Whatever loads comes after the refusal.
        monkeypatch.setattr(command, "_train", raising(AssertionError("this run begins")))
        refused.extend(liger(*TINY, "--output", str(tmp_path), *more) for more in ([], ["--resume"]))

    assert run(small, folder=tmp_path, save_every=2, observers=[At(3, second_run)]).losses == whole
    sentence = f"got {tmp_path}, in use by process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d}"
    found = [(code, sentence in said, "give another folder, or end that run" in said) for code, said in refused]
    assert found == [(2, True, True)] * 2
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]


def test_checkpoints_that_would_be_overwritten_are_an_error_before_anything_is_loaded(
    liger: InProcess, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_train", raising(AssertionError("it begins")))
    assert_refused(liger, "--output must be a folder without checkpoints", *TINY, "--output", str(stopped))


def test_resuming_a_finished_run_reports_it_again(small: Setup, whole: list[float], stopped: Path) -> None:
    run(small, folder=stopped, resume=True)
    row = run(small, folder=stopped, resume=True, observers=[At(6, raising(RuntimeError("a step too many")))])
    assert (row.losses, row.failed, row.parameters is not None) == (whole, False, True)
    assert row.notes[-1] == f"All 6 steps were done before; {stopped / 'checkpoint-6'} is the trained model."


def four_steps(small: Setup, technique: dict[str, Any]) -> Setup:
    """A setup that this machine can train; skips the test if it cannot."""
    setup = replace(small, steps=4, **technique)
    try:
        techniques.check(setup)
    except OptionError as missing:
        pytest.skip(str(missing))
    return setup


@pytest.mark.parametrize(
    "technique",
    [
        {"precision": "bf16", "checkpoint": "full", "accumulation": 2, "optimizer": "adamw-8bit"}, {"adapter": "lora"},
        {"optimizer": "galore"}, {"optimizer": "apollo-mini"},
    ],
    ids=lambda technique: "-".join(map(str, technique.values())),
)  # fmt: skip
def test_a_run_with_a_technique_resumes_exactly(small: Setup, tmp_path: Path, technique: dict[str, Any]) -> None:
    setup = four_steps(small, technique)
    run(replace(setup, steps=2), folder=tmp_path)
    assert run(setup, folder=tmp_path, resume=True).losses == run(setup).losses


# DeepSpeed's own AdamW would compile for most of a minute.
SHARDED = """
import sys
from dataclasses import replace
from pathlib import Path
from liger_core.commands import main
from liger_train import zero
from liger_train.runs.run import run
from liger_train.setup import Setup

zero.adam_problem = lambda: "not compiled in this test"
setup, folder = eval(sys.argv[1]), Path(sys.argv[2])
run(replace(setup, steps=2), folder=folder)
row = run(setup, folder=folder, resume=True)
assert not row.failed, row.reason
(folder / "losses").write_text(repr(row.losses))
sys.argv[1:3] = []
main()
"""


@pytest.mark.cpu
def test_a_run_with_deepspeed_resumes_exactly_saves_a_model_and_prints_its_results_alone(
    small: Setup, whole: list[float], tmp_path: Path
) -> None:
    setup = four_steps(small, {"shard": "zero3", "offload": "parameters"})
    done = forks.run(SHARDED, repr(setup), str(tmp_path), *setup.command().split()[1:], "--json")
    assert done.returncode == 0, done.stderr
    assert "unknown inputs or outputs" not in done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert repr(row["losses"]) == (tmp_path / "losses").read_text()
    assert row["losses"] == pytest.approx(whole[:4], rel=1e-4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    begun = AutoModelForCausalLM.from_pretrained(small.model)
    pairs = zip(model.parameters(), begun.parameters(), strict=True)
    moved = [(now - before).abs().max().item() for now, before in pairs]
    assert all(0 < each < 4.1 * small.learning_rate for each in moved)


@pytest.mark.parametrize(
    "technique", [{"optimizer": "galore-layerwise"}, {"shard": "zero3", "offload": "nvme"}], ids=["layerwise", "nvme"]
)
def test_a_run_whose_state_is_not_saved_cannot_resume(
    small: Setup, stopped: Path, monkeypatch: pytest.MonkeyPatch, technique: dict[str, Any]
) -> None:
    monkeypatch.setattr(techniques, "check", lambda setup: None)
    option, value = list(technique.items())[-1]
    with pytest.raises(OptionError, match=f"--resume cannot restore --{option} {value}"):
        run(replace(small, **technique), folder=stopped, resume=True)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_step_and_saves(small: Setup, whole: list[float], tmp_path: Path) -> None:
    row = run(small, folder=tmp_path, observers=[At(3, ctrl_c)])
    assert (row.interrupted, row.failed, row.losses) == (True, False, whole[:4])
    assert row.notes[-1] == f"Interrupted after step 4 of 6; a checkpoint was saved in {tmp_path}."
    assert names(tmp_path) == ["checkpoint-4"]
    # As before the run.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    row = run(small, folder=tmp_path, resume=True)
    assert (row.interrupted, row.losses) == (False, whole)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_ends_at_once(small: Setup, whole: list[float], tmp_path: Path) -> None:
    row = run(small, folder=tmp_path, observers=[At(3, ctrl_c), At(3, ctrl_c)])
    assert (row.interrupted, row.losses, names(tmp_path)) == (True, whole[:3], [])


@pytest.mark.usefixtures("interruptible")
def test_a_background_job_ignores_ctrl_c(small: Setup, whole: list[float]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    row = run(small, observers=[At(1, ctrl_c), At(3, ctrl_c)])
    assert (row.interrupted, row.losses) == (False, whole)


def ending(monkeypatch: pytest.MonkeyPatch, results: dict[str, Any]) -> None:
    """Let a run of the command end at once with these results."""
    monkeypatch.setattr(command, "_train", lambda setup, search, options, notes: row_of(setup, WHERE, results))


@pytest.mark.parametrize(
    ("outcome", "code"), [({}, 0), ({"interrupted": True}, 130), ({"out_of_memory": True}, 1), ({"failed": True}, 1)]
)
def test_every_end_has_its_row_and_exit_code(
    liger: InProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: dict[str, bool], code: int
) -> None:
    ending(monkeypatch, outcome)
    assert liger(*TINY, "--out", str(tmp_path))[0] == code
    (row,) = json.loads((tmp_path / "train.json").read_text())
    assert {name: value for name, value in row.items() if value is True} == outcome
    assert (tmp_path / "train.csv").read_text().splitlines()[0].split(",") == COLUMNS


class Full(io.StringIO):
    """A log on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_a_row_that_cannot_be_printed_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: bool
) -> None:
    ending(monkeypatch, {"losses": [1.5]})
    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(OSError, match="No space left on device"):
        command.train(model="tiny", device="cpu", out=tmp_path, as_json=as_json)
    (row,) = json.loads((tmp_path / "train.json").read_text())
    assert row["losses"] == [1.5]


def test_memory_that_runs_out_is_a_row(small: Setup, whole: list[float]) -> None:
    gone = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB. Of the allocated"
    )
    row = run(small, observers=[At(3, raising(gone))])
    assert (row.out_of_memory, row.failed, row.losses) == (True, False, whole[:3])
    assert row.reason == "out of memory: Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB"


def test_a_failure_is_a_row_with_its_reason(
    small: Setup, whole: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    row = run(small, observers=[At(2, raising(RuntimeError("a cable was pulled\nand more")))])
    assert (row.failed, row.reason, row.losses) == (True, "RuntimeError: a cable was pulled", whole[:2])
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_while_saving_leaves_the_checkpoint_before(
    small: Setup, whole: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def full(what: Any, path: Any, *rest: Any, **more: Any) -> None:
        if "checkpoint-4" in str(path):
            raise OSError(28, "No space left on device")
        save(what, path, *rest, **more)

    monkeypatch.setattr(torch, "save", full)
    row = run(small, folder=tmp_path, save_every=2)
    assert (row.failed, row.reason) == (True, "OSError: [Errno 28] No space left on device")
    monkeypatch.undo()
    row = run(small, folder=tmp_path, save_every=2, resume=True)
    assert row.losses == whole
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    assert row.notes[-1] == f"Resumed from step 2, {tmp_path / 'checkpoint-2'}."


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_for_the_results_loses_neither_earlier_rows_nor_this_one(
    liger: InProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = json.dumps([{"model": "earlier"}])
    (tmp_path / "train.json").write_text(before)
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *words, **more: printed.append(str(words[0])))
    ending(monkeypatch, {"losses": [1.0]})
    sentence = "File too large; the rows that it had are unchanged; make room"
    assert_refused(liger, sentence, *TINY, "--out", str(tmp_path), "--json")
    assert json.loads(printed[0])["rows"][0]["losses"] == [1.0]
    assert (tmp_path / "train.json").read_text() == before


def test_results_that_cannot_be_appended_to_are_an_error_before_the_run(liger: InProcess, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("other,columns\n")
    words = (*TINY, "--data", "no/such/file", "--out", str(tmp_path))
    assert_refused(liger, "must have the columns of this version", *words)


@pytest.fixture
def one_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is a rank; returns torchrun's store."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True)
    shared = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in shared.items():
        monkeypatch.setenv(name, value)
    return store


def test_the_first_rank_that_fails_speaks(one_of_two_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_train import ranks

    assert [ranks.reports(failed=False), ranks.reports(failed=True), ranks.reports(failed=True)] == [False, True, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert ranks.reports(failed=True), "after a restart, the next one speaks"


def test_one_rank_alone_prints_an_option_error_once(
    one_of_two_ranks: Any, liger: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*TINY, "--offload", "parameters")
    first, said = liger(*words)
    # torchrun restarts ranks after any error.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second, rest = liger(*words)
    assert (first, second) == (2, 2)
    assert "--offload parameters needs --shard zero3 or fsdp2" in said
    assert rest == ""
