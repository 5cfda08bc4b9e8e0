# SPDX-License-Identifier: Apache-2.0
"""Facts about modulated_rms_norm and modulated_layer_norm that their samples do not say."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import modulated_layer_norm, modulated_rms_norm
from ops.agreement import disagreements, leaf


def test_modulated_layer_norm_is_ada_ln(device: torch.device) -> None:
    def formula(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]

    given = {
        "x": leaf(3, 7, 48, device=device),
        "scale": leaf(3, 48, device=device),
        "shift": leaf(3, 48, device=device),
    }
    assert disagreements(modulated_layer_norm, formula, **given) == []


def test_modulated_rms_norm_scales_after_the_weight(device: torch.device) -> None:
    def formula(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6) * (1 + scale[:, None])

    given = {"x": leaf(3, 7, 48, device=device), "scale": leaf(3, 48, device=device), "weight": leaf(48, device=device)}
    assert disagreements(modulated_rms_norm, formula, **given) == []


def test_a_sample_gets_the_gradient_of_its_own_tokens(device: torch.device) -> None:
    x, scale = torch.randn(3, 7, 16, device=device), torch.zeros(3, 16, device=device, requires_grad=True)
    modulated_layer_norm(x, scale)[1].sum().backward()
    assert scale.grad is not None
    assert scale.grad.abs().sum(-1).ne(0).tolist() == [False, True, False]
