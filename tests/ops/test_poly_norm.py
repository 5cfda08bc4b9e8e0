# SPDX-License-Identifier: Apache-2.0
"""Facts about poly_norm that its samples do not say."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_core import nn, poly_norm, rms_norm
from ops.agreement import disagreements, leaf


def test_poly_norm_weighs_normalized_powers(device: torch.device) -> None:
    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return sum((w * rms_norm.reference(x**k) for w, k in zip(weight, (3, 2, 1), strict=True)), start=bias)

    given = {"x": leaf(5, 77, device=device), "weight": leaf(3, device=device), "bias": leaf(1, device=device)}
    assert disagreements(poly_norm, formula, **given) == []


def test_the_module_begins_with_equal_shares(device: torch.device) -> None:
    x = torch.randn(3, 8, device=device)
    expected = sum(rms_norm(x**k) for k in (1, 2, 3)) / 3
    torch.testing.assert_close(nn.PolyNorm().to(device)(x), expected)
