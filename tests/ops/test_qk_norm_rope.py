# SPDX-License-Identifier: Apache-2.0
"""Facts about qk_norm_rope that its samples do not say."""

from typing import Any

import pytest
import torch

from liger_core import explain, qk_norm_rope
from liger_core.ops._rotary import angles
from ops.agreement import leaf, saved


def arguments(device: torch.device) -> dict[str, Any]:
    cos, sin = (t[None].expand(2, -1, -1) for t in angles(device, torch.float32, 7, 16))
    q, k, *weights = (leaf(*shape, device=device) for shape in ((2, 4, 7, 16), (2, 2, 7, 16), (16,), (16,)))
    return {"q": q, "k": k, "q_weight": weights[0], "k_weight": weights[1], "cos": cos, "sin": sin}


def test_results_lie_in_memory_as_projections_do(device: torch.device) -> None:
    given = arguments(device)
    for name in ("q", "k"):
        given[name] = given[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out = qk_norm_rope(**given)
    grads = torch.autograd.grad(out, [given["q"], given["k"]], [torch.randn_like(o) for o in out])
    assert [t.stride() for t in (*out, *grads)] == 2 * [given["q"].stride(), given["k"].stride()]


def test_kernels_save_the_inputs_and_at_most_a_number_for_each_head(device: torch.device) -> None:
    given = arguments(device)
    if explain(qk_norm_rope, **given).backend == "reference":
        pytest.skip("autograd saves what the reference computes")

    everything = saved(lambda: qk_norm_rope(**given))
    inputs = {t.data_ptr() for t in given.values()}
    # Nothing else, where the backward pass begins from the inputs.
    assert sorted(t.numel() for t in everything if t.data_ptr() not in inputs) in ([], [2 * 7 * 2, 2 * 7 * 4])
    assert {t.data_ptr() for t in everything} >= {given["q"].data_ptr(), given["k"].data_ptr()}


def test_the_weight_gradient_is_summed_in_float32(device: torch.device) -> None:
    x = torch.ones(1, 8, 512, 8, device=device, dtype=torch.bfloat16)
    weight = torch.ones(8, device=device, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = torch.ones(512, 8, device=device), torch.zeros(512, 8, device=device)
    out = qk_norm_rope(x, x[:, :1], weight, weight.detach(), cos, sin)
    (grad,) = torch.autograd.grad(out[0], weight, torch.ones_like(out[0]))
    assert grad.tolist() == [4096.0] * 8
