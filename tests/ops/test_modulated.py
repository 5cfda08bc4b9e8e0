# SPDX-License-Identifier: Apache-2.0
"""Facts about modulated_rms_norm and modulated_layer_norm that their samples do not say."""

from __future__ import annotations

import torch

from liger_core import modulated_layer_norm


def test_a_sample_gets_the_gradient_of_its_own_tokens(device: torch.device) -> None:
    x, scale = torch.randn(3, 7, 16, device=device), torch.zeros(3, 16, device=device, requires_grad=True)
    modulated_layer_norm(x, scale)[1].sum().backward()
    assert scale.grad is not None
    assert scale.grad.abs().sum(-1).ne(0).tolist() == [False, True, False]
