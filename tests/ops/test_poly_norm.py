# SPDX-License-Identifier: Apache-2.0
"""Facts about poly_norm that its samples do not say."""

from __future__ import annotations

import torch

from liger_core import nn, rms_norm


def test_the_module_begins_with_equal_shares(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device)
    expected = sum(rms_norm(x**k) for k in (1, 2, 3)) / 3
    torch.testing.assert_close(nn.PolyNorm().to(device)(x), expected)
