# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints that are written while training continues."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import forks
from liger_train.runs import host_memory
from liger_train.runs.checkpoint_writer import THREAD, CheckpointWriter
from liger_train.runs.run import run
from liger_train.setup import Setup
from train.training import needs_distributed

pytestmark = [pytest.mark.cpu, needs_distributed]
GIB = 2**30


class SlowDisk(TrainerCallback):
    """Lets the writer continue with checkpoint-2 after the third step, and kills the rank while it writes the next."""

    def __init__(self) -> None:
        from torch.distributed import checkpoint

        self.save = checkpoint.save
        self.steps, self.writes = threading.Event(), threading.Event()
        checkpoint.save = self.slowly  # type: ignore[assignment]

    def slowly(self, *args: Any, **named: Any) -> Any:
        where = str(named.get("checkpoint_id") or named["storage_writer"].path)
        if "checkpoint-2" in where:
            assert self.steps.wait(forks.LIMIT)
        elif "shards" in where:
            self.writes.set()
            threading.Event().wait()
        return self.save(*args, **named)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3:
            self.steps.set()
        if state.global_step == 5:
            self.writes.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, setup: Setup, folder: Path, slow_disk: bool) -> None:
    row = run(setup, folder=folder, resume=True, save_every=2, observers=[SlowDisk()] if slow_disk else [])
    assert not row.failed, row.reason
    if rank == 0:
        (folder / "row.json").write_text(json.dumps(row.columns()))


@pytest.mark.slow
def test_training_continues_while_a_checkpoint_is_written_and_a_killed_run_resumes_from_the_last_complete_one(
    small: Setup, tmp_path: Path
) -> None:
    setup = replace(small, shard="fsdp2", ranks=2, batch=1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    forks.on_ranks(2, train, setup, whole, False)
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        forks.on_ranks(2, train, setup, killed, True)
    forks.on_ranks(2, train, setup, killed, False)
    row = json.loads((killed / "row.json").read_text())
    assert row["notes"][-2].startswith("checkpoint-4 was not completely written and was removed")
    assert row["notes"][-1] == f"Resumed from step 2, {killed / 'checkpoint-2'}."
    assert row["losses"] == json.loads((whole / "row.json").read_text())["losses"]
    one, other = (next((folder / "checkpoint-6").glob("*.safetensors")) for folder in (whole, killed))
    assert one.read_bytes() == other.read_bytes()


def alone(rank: int) -> None:
    """Call each check with a writer, and with the list of its failures."""
    dist.init_process_group("gloo")
    for check in (write_a_copy, raise_once, write_in_place):
        failures: list[BaseException] = []
        writer = CheckpointWriter(torch.device("cpu"), lambda failures=failures: failures.append(RuntimeError()))
        writer.connect()
        check(writer, failures)


def write_a_copy(writer: CheckpointWriter, failures: list[BaseException]) -> None:
    state, later, written = {"weight": torch.zeros(3)}, threading.Event(), []

    def write(state: dict[str, Any], group: Any) -> None:
        assert later.wait(forks.LIMIT)
        written.append(state["weight"].tolist())

    writer.add(state, write)
    writer.start(lambda: written.append("sealed"))
    state["weight"].fill_(1)
    later.set()
    writer.wait()
    assert (written, failures) == ([[0, 0, 0], "sealed"], [])


def write_in_place(writer: CheckpointWriter, failures: list[BaseException]) -> None:
    host_memory.available_bytes = lambda: 23  # type: ignore[assignment]
    state, written = {"weight": torch.zeros(3)}, []
    writer.add(state, lambda state, group: written.append(state["weight"]))
    writer.start(lambda: written.append("sealed"))
    assert written[0] is state["weight"]
    assert written[1] == "sealed"
    assert THREAD not in [thread.name for thread in threading.enumerate()]


def raise_once(writer: CheckpointWriter, failures: list[BaseException]) -> None:
    def seal() -> None:
        raise OSError("No space left on device")

    def fail() -> None:
        with writer:
            writer.add({}, lambda state, group: None)
            writer.start(seal)
            raise ValueError("of the run")

    writer.add({}, lambda state, group: None)
    writer.start(seal)
    with pytest.raises(OSError, match="No space"):
        writer.wait()
    writer.wait()
    assert len(failures) == 1
    # An error of a checkpoint does not hide one of the run.
    with pytest.raises(ValueError, match="of the run"):
        fail()
    assert len(failures) == 2


@pytest.mark.slow
def test_a_writer_writes_a_copy_or_in_place_and_raises_once() -> None:
    forks.on_ranks(1, alone)


def test_host_memory_is_that_of_the_machine_or_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMORY", "CGROUP", "CGROUPS"):
        monkeypatch.setattr(host_memory, name, tmp_path / name.lower())
    assert host_memory.available_bytes() == 0
    (tmp_path / "memory").write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n0::/job/step\n")
    assert host_memory.available_bytes() == 8 * GIB
    job = tmp_path / "cgroups" / "job"
    for folder, limit in ((job, 4 * GIB), (job / "step", "max")):
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(f"anon {GIB}\ninactive_file {2 * GIB}\n")
    assert host_memory.available_bytes() == 3 * GIB
