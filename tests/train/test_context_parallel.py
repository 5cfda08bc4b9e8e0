# SPDX-License-Identifier: Apache-2.0
"""Attention of context parallelism on the CPU takes no argument that it would not obey."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from liger_core.errors import OptionError
from liger_train.runs.context_parallel import context_parallel


def test_a_mask_of_one_ranks_tokens_is_refused() -> None:
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)
    states = [torch.zeros(1, 1, 4, 8) for _ in range(3)]
    mask = torch.ones(4, 4, dtype=torch.bool)
    with (
        context_parallel(mesh, buffers=[], buffer_seq_dims=[]),  # type: ignore[arg-type]
        pytest.raises(OptionError, match="train: --cp needs attention without a mask"),
    ):
        functional.scaled_dot_product_attention(*states, attn_mask=mask, is_causal=False)
