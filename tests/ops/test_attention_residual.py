# SPDX-License-Identifier: Apache-2.0
"""Facts about attention_residual that its samples do not say."""

from __future__ import annotations

import torch

from liger_core import attention_residual, nn
from ops.agreement import disagreements, leaf


def test_a_zero_query_gives_the_mean_of_the_layers(device: torch.device) -> None:
    layers = torch.randn(5, 3, 24, device=device)
    torch.testing.assert_close(nn.AttentionResidual(24, device=device)(layers), layers.mean(0))


def test_it_is_attention_with_normalized_keys(device: torch.device) -> None:
    def formula(layers: torch.Tensor, query: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        value = layers.movedim(0, -2)
        key = torch.nn.functional.rms_norm(value, (24,), weight, 1e-6)
        return torch.nn.functional.scaled_dot_product_attention(query.expand(3, 1, 24), key, value, scale=1.0).squeeze(
            -2
        )

    given = {
        "layers": leaf(5, 3, 24, device=device),
        "query": leaf(24, device=device),
        "weight": leaf(24, device=device),
    }
    assert disagreements(attention_residual, formula, **given) == []
