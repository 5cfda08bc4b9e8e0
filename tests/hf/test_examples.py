# SPDX-License-Identifier: Apache-2.0
"""Every example runs, with Liger in it, and its loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

FOLDER = Path(__file__).parents[2] / "examples"
TWO = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone")
RUNS: dict[str, tuple[str, ...]] = {
    "accelerate": ("with_accelerate.py",),
    "fsdp2": (*TWO, "with_fsdp2.py"),
    "deepspeed_zero_2": (*TWO, "with_deepspeed.py", "--stage", "2"),
    "deepspeed_zero_3": (*TWO, "with_deepspeed.py", "--stage", "3"),
    "lora": ("with_lora.py",),
    "qlora": ("with_qlora.py",),
}
NEEDS = {"deepspeed_zero_2": "deepspeed", "deepspeed_zero_3": "deepspeed", "lora": "peft", "qlora": "bitsandbytes"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_trains_with_liger(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs {NEEDS[name]}")
    # No GPU: the tests of the GPU are those that compare.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LIGER_BACKEND": "reference"}
    done = subprocess.run([sys.executable, *RUNS[name]], cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 × linear_cross_entropy, 2 × add_rms_norm, 2 × rope, 2 × swiglu, 5 × rms_norm replaced" in done.stdout
    losses = [float(value) for value in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.05


def test_every_example_is_run_and_listed() -> None:
    examples = {path.name for path in FOLDER.glob("with_*.py")}
    assert examples == {argument for run in RUNS.values() for argument in run if argument.startswith("with_")}
    page = (FOLDER / "README.md").read_text()
    assert [name for name in examples if f"({name})" not in page] == []
