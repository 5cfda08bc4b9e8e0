# SPDX-License-Identifier: Apache-2.0
"""Runs with several ranks: on one machine, and on two machines, one of which is lost in the middle.

Each machine is an agent of torchrun on this one. The test holds the store of their rendezvous, so its port is free, and
either agent may be lost.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_core.errors import OptionError
from liger_train.runs import launch
from liger_train.runs.run import run
from liger_train.setup import Setup
from train.training import needs_distributed

pytestmark = [pytest.mark.cpu, needs_distributed]
LIMIT = 900
KILLED = """
import os, signal
if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""
# What the command does, but the second machine is lost in the middle of the fourth step: its agent and its rank die.
LOST = """
import os, pathlib, signal
from liger_core.commands import main
from liger_train.runs.trainer import Sealer

def lose(self, args, state, control, **more):
    mark = pathlib.Path(__file__).with_name("lost")
    if state.global_step == 3 and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGKILL)

Sealer.on_pre_optimizer_step = lose
main()
"""


def agent(*words: str, module: str = "torch.distributed.run") -> subprocess.Popen[str]:
    """Start torchrun, or another module."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip


def printed(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return the rows that a machine prints before it ends."""
    out, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    return [row for line in out.splitlines() for row in json.loads(line)["rows"]]


@pytest.fixture(scope="module")
def both(small: Setup) -> Setup:
    return replace(small, batch=1, ranks=2)


@pytest.mark.slow
def test_an_error_of_the_ranks_is_printed_once_without_a_traceback(
    both: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    words = [*launch.command(both)[3:], "--output", str(tmp_path)]
    failed = agent(*words, module="liger_core")
    # Every Python imports this module when it starts.
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    killed = agent(*words, "--resume", module="liger_core")
    for process, code, said in (
        (failed, 2, f"SetupError: train: --output must be a folder without checkpoints, got {tmp_path}"),
        (killed, 1, "train: rank 1 died: SIGKILL"),
    ):
        _, errors = process.communicate(timeout=LIMIT)
        assert (process.returncode, errors.count(said)) == (code, 1), errors
        assert "Traceback" not in errors
        assert "ChildFailedError" not in errors


@pytest.mark.slow
def test_ctrl_c_stops_all_ranks_after_a_step(both: Setup) -> None:
    process = agent(*launch.command(replace(both, steps=10**6))[3:], module="liger_core")
    # A line of progress, every few seconds.
    errors = next(line for line in process.stderr if "loss" in line)
    process.send_signal(signal.SIGINT)
    output, rest = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, errors + rest
    assert "Interrupted after step" in output + rest
    assert "Traceback" not in rest


def test_machines_that_do_not_share_the_folder_are_an_error(
    small: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine without the first rank.
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(OptionError, match="--output must be a folder that all machines share, got"):
        run(small, folder=tmp_path / "of this machine")


@pytest.mark.slow
def test_two_machines_train_as_the_ranks_of_one_though_one_of_them_is_lost_in_the_middle(
    small: Setup, both: Setup, tmp_path: Path
) -> None:
    words = (*launch.command(both)[3:], "--out", str(tmp_path / "rows"), "--json")
    (one_machine,) = printed(agent(*words, module="liger_core"))
    assert json.loads((tmp_path / "rows" / "train.json").read_text()) == [one_machine]
    assert one_machine["ranks"] == 2
    assert one_machine["losses"] == pytest.approx(run(small).losses, rel=1e-4)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = tmp_path / "train.py"
    script.write_text(LOST)
    _, _, _, _, _, *train = both.command().split()
    machine = [
        *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-conf", "is_host=0,keep_alive_interval=1"),
        *(str(script), *train, "--output", str(tmp_path / "saved"), "--save-every", "2", "--resume", "--json"),
    ]
    machines = [agent(*machine), agent(*machine)]
    while all(process.poll() is None for process in machines):
        time.sleep(0.1)
    (lost,) = (process for process in machines if process.poll() is not None)
    assert lost.returncode == -signal.SIGKILL, lost.communicate()
    machines[machines.index(lost)] = agent(*machine)
    rows = [row for process in machines for row in printed(process)]
    # The first row is of the run whose other rank was lost.
    assert [row["failed"] for row in rows] == [True, False]
    assert rows[1]["losses"] == one_machine["losses"]
    assert rows[1]["notes"][-1] == f"Resumed from step 2, {tmp_path / 'saved' / 'checkpoint-2'}."
