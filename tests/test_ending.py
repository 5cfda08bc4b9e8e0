# SPDX-License-Identifier: Apache-2.0
"""A process with a process group ends by itself, before the interpreter takes down what a thread of gloo still uses."""

import ast
import atexit
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]

# What a busy thread of gloo does when the interpreter ends is up to chance; this is certain.
ABORTING = "import atexit, os; atexit.register(os.abort)\n"


def aborting(rank: int) -> None:
    print("a rank")
    atexit.register(os.abort)


def test_a_rank_of_the_tests_has_ended_before_the_interpreter_does() -> None:
    from hf.two_ranks import on_two_ranks

    on_two_ranks(aborting)


@pytest.mark.slow
def test_a_rank_of_a_run_has_ended_before_the_interpreter_does(tmp_path: Path) -> None:
    script = (
        f"{ABORTING}import torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        f"from liger_train.ranks import leave\nprint('all of it', end='')\nleave(130)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (130, "all of it"), done.stderr


def test_a_process_without_others_is_not_ended() -> None:
    from liger_train.ranks import leave

    leave(1)


def test_no_test_starts_ranks_that_end_otherwise() -> None:
    trees = {path: ast.parse(path.read_text()) for path in Path(__file__).parent.rglob("*.py")}
    starting = [
        path.name
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if getattr(node, "attr", "") in ("spawn", "start_processes")
    ]
    assert starting == ["forks.py"]
