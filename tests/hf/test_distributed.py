# SPDX-License-Identifier: Apache-2.0
"""On two processes a patched model has the gradients of one process, and the logits stay lazy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from hf.two_ranks import WAYS, train, work

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
# Two ranks need a GPU each.
DEVICES = pytest.mark.parametrize(
    "ranks_on",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))],
    ids=["gloo", "nccl"],
)
PATCH_LAST = pytest.mark.parametrize("patch_last", [False, True], ids=["patched_then_wrapped", "wrapped_then_patched"])


@DEVICES
@PATCH_LAST
def test_gradients_of_two_ranks_are_the_mean_of_single_ones(patch_last: bool, ranks_on: str, tmp_path: Path) -> None:
    # A model inside DDP is the same object as before it; only sharding changes what apply sees.
    ways = tuple(way for way in WAYS if way.startswith("fsdp") or not patch_last)
    torch.multiprocessing.spawn(work, args=(str(tmp_path / "store"), ways, patch_last, ranks_on), nprocs=2)


@DEVICES
@PATCH_LAST
def test_fsdp2_trains_to_the_losses_of_the_plain_model(patch_last: bool, ranks_on: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train, args=(str(tmp_path / "store"), ("fsdp2",), patch_last, ranks_on), nprocs=2)


@needs_deepspeed
@DEVICES
@PATCH_LAST
def test_zero_trains_to_the_losses_of_the_plain_model_at_every_stage(patch_last: bool, ranks_on: str, tmp_path: Path) -> None:
    stages = ("zero0", "zero1", "zero2", "zero3")
    torch.multiprocessing.spawn(train, args=(str(tmp_path / "store"), stages, patch_last, ranks_on), nprocs=2)
