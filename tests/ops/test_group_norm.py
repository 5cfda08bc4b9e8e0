# SPDX-License-Identifier: Apache-2.0
"""Facts about group_norm that its samples do not say."""

from __future__ import annotations

import pytest
import torch

from liger_core import Unsupported


def test_a_group_that_32_bits_cannot_count_is_declined() -> None:
    """The kernels count in 32 bits within a group, and would leave the result unwritten."""
    kernel = pytest.importorskip("liger_triton.group_norm").group_norm
    with pytest.raises(Unsupported, match=r"^groups of 2147483648 numbers, more than 2147418112$"):
        kernel(torch.zeros(1, 1, 1).expand(1, 1, 2**31), 1)
