# SPDX-License-Identifier: Apache-2.0
"""Every example runs, with Liger in it, and its loss falls."""

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import forks

pytestmark = pytest.mark.cpu

FOLDER = Path(__file__).parents[2] / "examples"
# The number of ranks, and the rest of the command.
RUNS: dict[str, tuple[Any, ...]] = {
    "accelerate": (1, "with_accelerate.py"),
    "fsdp2": (2, "with_fsdp2.py"),
    "deepspeed_zero_2": (2, "with_deepspeed.py", "--stage", "2"),
    "deepspeed_zero_3": (2, "with_deepspeed.py", "--stage", "3"),
    "lora": (1, "with_lora.py"),
    "qlora": (1, "with_qlora.py"),
}
REPLACED = "1 × linear_cross_entropy, 2 × add_rms_norm, 2 × rope, 2 × swiglu, 5 × rms_norm replaced"
# The number of layers with an adapter.
ADAPTED = {"lora": 14, "qlora": 14}
NEEDS = {"deepspeed_zero_2": "deepspeed", "deepspeed_zero_3": "deepspeed", "lora": "peft", "qlora": "bitsandbytes"}


def example(rank: int, output: Path, script: str, *arguments: str) -> None:
    """One rank; what it prints goes to a file."""
    # No GPU: the tests of the GPU are those that compare.
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", LIGER_BACKEND="reference")
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.chdir(FOLDER)
    sys.path.insert(0, str(FOLDER))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains_with_liger(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs {NEEDS[name]}")
    count, *words = RUNS[name]
    forks.on_ranks(count, example, tmp_path / "output", *words)
    printed = (tmp_path / "output").read_text()
    found = re.search(r"1 × linear_cross_entropy.* replaced", printed)
    assert found[0].replace(f", {ADAPTED.get(name, 0)} × lora_linear", "") == REPLACED
    assert ("lora_linear" in found[0]) == (name in ADAPTED)
    losses = [float(value) for value in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.05


def test_every_example_is_run_and_listed() -> None:
    examples = {path.name for path in FOLDER.glob("with_*.py")}
    assert examples == {run[1] for run in RUNS.values()}
    page = (FOLDER / "README.md").read_text()
    assert [name for name in examples if f"({name})" not in page] == []
