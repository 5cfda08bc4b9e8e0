# SPDX-License-Identifier: Apache-2.0
"""Facts about dyt that its samples do not say."""

from __future__ import annotations

import torch

from liger_core import nn


def test_the_module_has_the_parameters_of_the_paper(device: torch.device) -> None:
    module = nn.DyT(8).to(device)
    assert {name: p.flatten()[0].item() for name, p in module.named_parameters()} == {
        "alpha": 0.5,
        "weight": 1.0,
        "bias": 0.0,
    }
    x = torch.randn(3, 8, device=device)
    torch.testing.assert_close(module(x), torch.tanh(0.5 * x))
    assert nn.DyT(8, bias=False, alpha=2.0).bias is None
