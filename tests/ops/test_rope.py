# SPDX-License-Identifier: Apache-2.0
"""Facts about rope that its samples do not say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from liger_core import BackendError, GradientError, rope, use
from liger_core.ops._rotary import angles
from ops.agreement import disagreements, leaf

LAYOUTS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def heads(
    device: torch.device,
    tokens: int = 7,
    width: int = 16,
    query: int = 4,
    key: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    return leaf(2, query, tokens, width, device=device, dtype=dtype), leaf(
        2, key, tokens, width, device=device, dtype=dtype
    )


@LAYOUTS
def test_rope_keeps_the_norm_of_every_vector(interleaved: bool, device: torch.device) -> None:
    q, k = heads(device)
    cos, sin = angles(device, torch.float32, 7, 16, interleaved=interleaved)
    for before, after in zip((q, k), rope(q, k, cos, sin, interleaved=interleaved), strict=True):
        torch.testing.assert_close(after.norm(dim=-1), before.norm(dim=-1))


@LAYOUTS
def test_rotating_back_gives_the_input(interleaved: bool, device: torch.device) -> None:
    q, k = heads(device)
    cos, sin = angles(device, torch.float32, 7, 16, interleaved=interleaved)
    back = rope(*rope(q, k, cos, sin, interleaved=interleaved), cos, -sin, interleaved=interleaved)
    torch.testing.assert_close(back, (q, k))


@LAYOUTS
def test_products_depend_on_the_distance_of_positions_alone(interleaved: bool, device: torch.device) -> None:
    q, k = (x[:, :, :1].expand(-1, -1, 9, -1) for x in heads(device, key=4))
    cos, sin = angles(device, torch.float32, 9, 16, interleaved=interleaved)
    q, k = rope(q, k, cos, sin, interleaved=interleaved)
    scores = q @ k.transpose(-1, -2)
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], atol=1e-5, rtol=1e-5)


@LAYOUTS
def test_the_first_position_is_not_rotated(interleaved: bool, device: torch.device) -> None:
    q, k = heads(device)
    turned = rope(q, k, *angles(device, torch.float32, 7, 16, interleaved=interleaved), interleaved=interleaved)
    assert torch.equal(turned[0][:, :, 0], q[:, :, 0])
    assert torch.equal(turned[1][:, :, 0], k[:, :, 0])


def test_rope_is_the_formula_of_transformers(device: torch.device) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")

    def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = modeling.apply_rotary_pos_emb(q, k, cos, sin)
        return result

    q, k = heads(device)
    cos, sin = (t[None].expand(2, -1, -1) for t in angles(device, torch.float32, 7, 16))
    assert disagreements(rope, formula, q=q, k=k, cos=cos, sin=sin) == []


def test_interleaved_is_the_other_layout_after_a_permutation_of_columns(device: torch.device) -> None:
    q, k = heads(device)
    apart = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2))).to(device)
    interleaved = rope(q, k, *angles(device, torch.float32, 7, 16, interleaved=True), interleaved=True)
    halves = rope(q[..., apart], k[..., apart], *angles(device, torch.float32, 7, 16))
    torch.testing.assert_close(tuple(t[..., apart] for t in interleaved), halves)


def test_columns_past_the_rotary_width_are_the_same_bits(device: torch.device) -> None:
    q, k = heads(device, width=40)
    turned = rope(q, k, *angles(device, torch.float32, 7, 16))
    assert torch.equal(turned[0][..., 16:], q[..., 16:])
    assert torch.equal(turned[1][..., 16:], k[..., 16:])


def test_inplace_overwrites_and_returns_its_inputs(device: torch.device) -> None:
    q, k = (x.detach() for x in heads(device))
    cos, sin = angles(device, torch.float32, 7, 16)
    expected = rope(q, k, cos, sin)
    versions = q._version, k._version
    turned = rope(q, k, cos, sin, inplace=True)
    torch.testing.assert_close((q, k), expected)
    assert [t.data_ptr() for t in turned] == [q.data_ptr(), k.data_ptr()]
    assert q._version > versions[0]
    assert k._version > versions[1]


def test_inplace_on_views_of_a_projection_leaves_the_rest_of_it(device: torch.device) -> None:
    packed = torch.randn(2, 7, 8, 16, device=device)
    before = packed.clone()
    q, k = packed[:, :, :4].transpose(1, 2), packed[:, :, 4:6].transpose(1, 2)
    cos, sin = angles(device, torch.float32, 7, 16)
    expected = rope(q, k, cos, sin)
    rope(q, k, cos, sin, inplace=True)
    torch.testing.assert_close((q, k), expected)
    assert torch.equal(packed[:, :, 6:], before[:, :, 6:])


def test_inplace_has_the_gradients_of_the_other_form(device: torch.device) -> None:
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q * 1.0, k * 1.0, cos, sin, inplace=True)

    q, k = heads(device)
    cos, sin = angles(device, torch.float32, 7, 16)
    assert disagreements(turned, rope.reference, q=q, k=k, cos=cos, sin=sin) == []


def test_inplace_on_views_has_the_gradients_of_the_other_form(device: torch.device) -> None:
    """Queries and keys as attention has them: (B, heads, T, D) views of (B, T, heads, D)."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope((q * 1.0).transpose(1, 2), (k * 1.0).transpose(1, 2), cos, sin, inplace=True)

    def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope.reference(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    q, k = leaf(2, 7, 4, 16, device=device), leaf(2, 7, 2, 16, device=device)
    cos, sin = angles(device, torch.float32, 7, 16)
    assert disagreements(turned, formula, q=q, k=k, cos=cos, sin=sin) == []


def test_inplace_on_two_views_of_one_tensor_has_the_gradients_of_both(device: torch.device) -> None:
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


def test_low_precision_angles_are_not_needed(device: torch.device) -> None:
    """float32 cos and sin rotate bfloat16 heads better than bfloat16 ones."""
    q, k = (x.detach() for x in heads(device, dtype=torch.bfloat16, tokens=40))
    exact = rope.reference(q.double(), k.double(), *angles(device, torch.float64, 40, 16))
    wide, low = (rope(q, k, *angles(device, dtype, 40, 16)) for dtype in (torch.float32, torch.bfloat16))
    assert (wide[0] - exact[0]).norm() < (low[0] - exact[0]).norm()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    draw=st.integers(0, 99),
    batch=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.integers(1, 9),
    half=st.integers(1, 12),
    rest=st.integers(0, 9),
    interleaved=st.booleans(),
)
def test_any_shape_is_the_rotation_of_complex_numbers(
    device: torch.device,
    draw: int,
    batch: int,
    key_heads: int,
    group: int,
    tokens: int,
    half: int,
    rest: int,
    interleaved: bool,
) -> None:
    torch.manual_seed(draw)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = x[..., : 2 * half]
        pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).transpose(-1, -2)
        step = slice(0, None, 2) if interleaved else slice(0, half)
        turned = torch.view_as_real(
            torch.view_as_complex(pairs.contiguous()) * torch.complex(cos[:, step], sin[:, step])
        )
        turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
        return torch.cat((turned, x[..., 2 * half :]), dim=-1)

    def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return turn(q, cos, sin), turn(k, cos, sin)

    width = 2 * half + rest
    q, k = (leaf(batch, n, tokens, width, device=device) for n in (key_heads * group, key_heads))
    cos, sin = angles(device, torch.float32, tokens, 2 * half, interleaved=interleaved)
    assert disagreements(lambda **a: rope(**a, interleaved=interleaved), formula, q=q, k=k, cos=cos, sin=sin) == []


def test_complex_angles_are_interleaved_tables(device: torch.device) -> None:
    """Llama 4 and DeepSeek V2: neighboring columns are a complex number."""
    q, k, angle = (torch.randn(*shape, device=device) for shape in ((2, 4, 5, 16), (2, 2, 5, 16), (5, 8)))
    cis = torch.polar(torch.ones_like(angle), angle)
    expected = [torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * cis).flatten(-2) for x in (q, k)]
    for got, wanted in zip(
        rope(q, k, *(t.repeat_interleave(2, -1) for t in (cis.real, cis.imag)), interleaved=True), expected, strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_sections_of_several_positions_are_columns_of_the_tables(device: torch.device) -> None:
    """mRoPE of Qwen-VL, and 2-D RoPE of images: each section of columns has the angles of its own position (time,
    height, width)."""
    sections, frequency = (2, 3, 3), 10.0 ** -torch.arange(8, device=device)
    position = torch.randint(50, (3, 2, 5), device=device)
    q, k = torch.randn(2, 4, 5, 16, device=device), torch.randn(2, 2, 5, 16, device=device)
    angle = torch.cat([(position[i][..., None] * f) for i, f in enumerate(frequency.split(sections))], dim=-1)
    tables = [torch.cat((t, t), dim=-1) for t in (angle.cos(), angle.sin())]
    of_pair = torch.arange(3, device=device).repeat_interleave(torch.tensor(sections, device=device))
    for got, x in zip(rope(q, k, *tables), (q, k), strict=True):
        for pair, section in enumerate(of_pair.tolist()):
            cos, sin = (f(position[section] * frequency[pair])[:, None] for f in (torch.cos, torch.sin))
            first, second = x[..., pair], x[..., pair + 8]
            torch.testing.assert_close(got[..., pair], first * cos - second * sin)
            torch.testing.assert_close(got[..., pair + 8], second * cos + first * sin)


def test_packed_tokens_are_one_sequence_whose_positions_begin_again(device: torch.device) -> None:
    """(tokens, heads, width), as attention on packed sequences takes them."""
    lengths, (cos, sin) = (3, 4), (torch.randn(4, 16, device=device), torch.randn(4, 16, device=device))
    q, k = torch.randn(7, 4, 16, device=device), torch.randn(7, 2, 16, device=device)
    position = torch.cat([torch.arange(n, device=device) for n in lengths])
    packed = rope(*(x.transpose(0, 1)[None] for x in (q, k)), cos[position], sin[position])
    for got, x in zip(packed, (q, k), strict=True):
        alone = [
            rope(*2 * (part.transpose(0, 1)[None],), cos[: len(part)], sin[: len(part)])[0] for part in x.split(lengths)
        ]
        torch.testing.assert_close(got, torch.cat(alone, dim=2))


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
        assert q.grad is not None
        assert k.grad is not None
        return q.grad, k.grad

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
