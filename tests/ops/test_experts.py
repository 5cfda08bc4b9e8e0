# SPDX-License-Identifier: Apache-2.0
"""Facts about experts that its samples do not say."""

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core import experts
from ops.agreement import leaf, saved

TOKENS, TOP, EXPERTS, HIDDEN, INNER = 20, 3, 6, 32, 16


def routing(device: torch.device) -> Tensor:
    return torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(TOKENS)]).to(device)


def arguments(device: torch.device) -> dict[str, Tensor]:
    return {
        "x": leaf(TOKENS, HIDDEN, device=device),
        "gate_up": leaf(EXPERTS, 2 * INNER, HIDDEN, device=device, scale=HIDDEN**-0.5),
        "down": leaf(EXPERTS, HIDDEN, INNER, device=device, scale=INNER**-0.5),
        "weight": leaf(TOKENS, TOP, device=device),
    }


@pytest.mark.parametrize(
    ("half", "options"), [(1, {"limit": 0.5}), (0, {"activation": "relu_squared"})], ids=["limit", "relu_squared"]
)
def test_where_the_activation_is_flat_the_gradient_is_zero_also_beside_an_overflow(
    half: int, options: dict[str, Any], device: torch.device
) -> None:
    """gate overflows to -inf and up to inf, so that values and slopes beside a flat piece are not finite."""
    x = torch.full((2, 1), -65504.0, dtype=torch.float16, device=device)
    gate_up = torch.tensor([[[2.0], [-2.0]]], dtype=torch.float16, device=device, requires_grad=True)
    down, weight = (torch.ones(shape, dtype=torch.float16, device=device) for shape in ((1, 1, 1), (2, 1)))
    experts(x, gate_up, down, torch.zeros(2, 1, dtype=torch.int64, device=device), weight, **options).sum().backward()
    assert gate_up.grad[0, half, 0] == 0


def test_large_upstream_gradients_give_router_weights_a_gradient_that_fits(device: torch.device) -> None:
    """In float16 down's transpose times the upstream gradient leaves the range; times the activation and in the sum it
    does not."""
    weight = torch.ones(1, 1, dtype=torch.float16, device=device, requires_grad=True)
    x, gate_up, down = weight.new_full((1, 8), 1 / 1024), weight.new_ones(1, 2, 8), weight.new_ones(1, 8, 1)
    y = experts(x, gate_up, down, torch.zeros(1, 1, dtype=torch.int64, device=device), weight)
    y.backward(torch.full_like(y, 30000.0))
    assert torch.isfinite(weight.grad).all()
    assert weight.grad.item() > 1


def test_large_activations_give_down_a_gradient_that_fits(device: torch.device) -> None:
    """In float16 the activation times a router weight of 4 leaves the range."""
    down = torch.ones(1, 1, 1, dtype=torch.float16, device=device, requires_grad=True)
    x = torch.full((1, 1), 150.0, dtype=torch.float16, device=device)
    gate_up, weight = x.new_ones(1, 2, 1), x.new_full((1, 1), 4.0)
    y = experts(x, gate_up, down, torch.zeros(1, 1, dtype=torch.int64, device=device), weight)
    y.backward(torch.full_like(y, 0.25))
    assert down.grad.item() == pytest.approx(150.0 * 150.0, rel=1e-3)


def test_matrices_stored_transposed_get_gradients_that_are_stored_so(device: torch.device) -> None:
    given, index = arguments(device), routing(device)
    stored = [given[name].detach().mT.contiguous().requires_grad_() for name in ("gate_up", "down")]
    experts(given["x"], *[matrix.mT for matrix in stored], index, given["weight"]).sum().backward()
    assert all(matrix.grad is not None and matrix.grad.is_contiguous() for matrix in stored)


def test_a_fused_backend_keeps_one_tensor_of_as_many_rows_as_there_are_slots(
    device: torch.device, chosen_backend: str
) -> None:
    if chosen_backend == "reference" or (chosen_backend == "auto" and device.type == "cpu"):
        pytest.skip("the reference keeps what autograd keeps")
    given, index = arguments(device), routing(device)
    kept = saved(lambda: experts(given["x"], given["gate_up"], given["down"], index, given["weight"]))
    rows = [t.shape for t in kept if t.dim() == 2 and t.shape[0] == TOKENS * TOP]
    assert rows == [(TOKENS * TOP, 2 * INNER)]


def test_torch_gets_matrices_only_in_the_layouts_that_it_multiplies() -> None:
    grouped = pytest.importorskip("liger_triton._grouped")
    dense = torch.zeros(8, 16, 24, dtype=torch.bfloat16)
    layouts = {
        "rows": dense,
        "columns": dense.mT,
        "experts": dense.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        "one_row_for_all": dense[:, :1].expand(-1, 16, -1),
        "odd_width": torch.zeros(8, 16, 25, dtype=torch.bfloat16),
        "unaligned": dense.view(-1)[1:385].view(2, 8, 24),
    }
    assert [name for name, matrices in layouts.items() if grouped._aligned(matrices)] == ["rows", "columns"]
