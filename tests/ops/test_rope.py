# SPDX-License-Identifier: Apache-2.0
"""Facts about rope that its samples do not say."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from liger_core import BackendError, GradientError, rope, use
from liger_core.ops._rotary import angles
from ops.agreement import leaf


def heads(device: torch.device, width: int = 16) -> tuple[Tensor, Tensor]:
    return leaf(2, 4, 7, width, device=device), leaf(2, 2, 7, width, device=device)


def test_columns_past_the_rotary_width_are_the_same_bits(device: torch.device) -> None:
    q, k = heads(device, width=40)
    turned = rope(q, k, *angles(device, torch.float32, 7, 16))
    assert torch.equal(turned[0][..., 16:], q[..., 16:])
    assert torch.equal(turned[1][..., 16:], k[..., 16:])


def test_inplace_overwrites_and_returns_its_inputs(device: torch.device) -> None:
    q, k = (x.detach() for x in heads(device))
    cos, sin = angles(device, torch.float32, 7, 16)
    expected = rope(q, k, cos, sin)
    turned = rope(q, k, cos, sin, inplace=True)
    torch.testing.assert_close((q, k), expected)
    assert [t.data_ptr() for t in turned] == [q.data_ptr(), k.data_ptr()]


def test_inplace_on_views_of_a_projection_leaves_the_rest_of_it(device: torch.device) -> None:
    packed = torch.randn(2, 7, 8, 16, device=device)
    before = packed.clone()
    q, k = packed[:, :, :4].transpose(1, 2), packed[:, :, 4:6].transpose(1, 2)
    cos, sin = angles(device, torch.float32, 7, 16)
    expected = rope(q, k, cos, sin)
    rope(q, k, cos, sin, inplace=True)
    torch.testing.assert_close((q, k), expected)
    assert torch.equal(packed[:, :, 6:], before[:, :, 6:])


def test_inplace_on_two_views_of_one_tensor_has_the_gradients_of_both(device: torch.device) -> None:
    """Queries and keys as attention has them: (B, heads, T, D) views of (B, T, heads, D)."""
    packed = leaf(2, 7, 6, 16, device=device)
    cos, sin = angles(device, torch.float32, 7, 16)
    upstream = torch.randn(2, 7, 6, 16, device=device)
    gradients = []
    for inplace in (False, True):
        whole = packed * 1.0
        q, k = whole[:, :, :4].transpose(1, 2), whole[:, :, 4:].transpose(1, 2)
        turned = rope(q, k, cos, sin, inplace=inplace)
        whole = whole if inplace else torch.cat(turned, dim=1).transpose(1, 2)
        gradients.extend(torch.autograd.grad(whole, packed, upstream))
    torch.testing.assert_close(*gradients)


def test_inplace_on_a_value_that_a_backward_needs_is_refused(device: torch.device) -> None:
    leaves = heads(device)
    q, k = (x * 1.0 for x in leaves)
    needs_q = q.square()
    rope(q, k, *angles(device, torch.float32, 7, 16), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        needs_q.sum().backward()


@pytest.mark.parametrize("total", [torch.positive, torch.square], ids=["sum", "squares"])
def test_a_second_derivative_in_place_is_right_or_refused(
    total: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    cos, sin = angles(device, torch.float32, 7, 16)

    def penalized(inplace: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        q, k = heads(device)
        loss = sum(total(x).sum() for x in rope(q**3, k**3, cos, sin, inplace=inplace))
        first = torch.autograd.grad(loss, (q, k), create_graph=True)
        torch.autograd.backward(loss + sum(g.square().sum() for g in first))
        return q.grad, k.grad  # type: ignore[return-value]

    with use("reference"):
        expected = penalized(inplace=False)
    with suppress(GradientError):
        torch.testing.assert_close(penalized(inplace=True), expected)


def test_transforms_take_a_call_in_place(device: torch.device) -> None:
    cos, sin = angles(device, torch.float32, 7, 16)
    q, k = (x.detach() for x in heads(device))
    # A backend that is selected by name declines.
    with suppress(BackendError):
        batched = torch.func.vmap(lambda q, k: rope(q[None] * 1, k[None] * 1, cos, sin, inplace=True))(q, k)
        torch.testing.assert_close(tuple(x[:, 0] for x in batched), rope(q, k, cos, sin))
