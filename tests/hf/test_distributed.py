# SPDX-License-Identifier: Apache-2.0
"""On two processes a patched model has the gradients of one process, and the logits stay lazy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf.two_ranks import WAYS, work


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("patch_last", [False, True], ids=["patched_then_wrapped", "wrapped_then_patched"])
def test_gradients_of_two_ranks_are_the_mean_of_single_ones(patch_last: bool, tmp_path: Path) -> None:
    # A model inside DDP is the same object as before it; only sharding changes what apply sees.
    ways = tuple(way for way in WAYS if way.startswith("fsdp") or not patch_last)
    torch.multiprocessing.spawn(work, args=(str(tmp_path / "store"), ways, patch_last), nprocs=2)
