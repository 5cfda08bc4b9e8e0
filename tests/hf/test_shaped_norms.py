# SPDX-License-Identifier: Apache-2.0
"""Norms whose rows are not the last dimension: groups of channels, channels before the space, heads side by side."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import liger_hf
from hf.tiny_models import module_disagreements, outcome, pair_of
from liger_core.accuracy import error

pytestmark = pytest.mark.cpu


class ChannelsFirst(nn.LayerNorm):
    data_format = "channels_first"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Heads(nn.Module):
    def __init__(self, centered: bool, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.eps, self.centered = 4, 8, 1e-6, centered
        self.weight = nn.Parameter(torch.ones(32))
        self.bias = nn.Parameter(torch.zeros(32)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        row = x.float()
        row = row - row.mean(-1, keepdim=True) if self.centered else row
        row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + self.eps)
        y = row.to(x.dtype).reshape(*x.shape[:2], -1) * self.weight
        return y if self.bias is None else y + self.bias


class Inverse(nn.Module):
    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


# The op, a module, and the shapes of inputs that it takes.
Norm = tuple[str, Callable[[], nn.Module], tuple[tuple[int, ...], ...]]
NORMS: dict[str, Norm] = {
    "groups": ("group_norm", lambda: nn.GroupNorm(4, 32), ((3, 32, 5, 6), (2, 32, 9), (7, 32))),
    "groups_without_weights": ("group_norm", lambda: nn.GroupNorm(2, 6, eps=1e-3, affine=False), ((3, 6, 20),)),
    "one_group": ("group_norm", lambda: nn.GroupNorm(1, 12), ((2, 12, 30),)),
    "channels_first": ("layer_norm", lambda: ChannelsFirst(24, eps=1e-6), ((2, 24, 3, 5),)),
    "centered_heads": ("layer_norm", lambda: Heads(True, True), ((2, 5, 4, 8),)),
    "heads": ("rms_norm", lambda: Heads(False, False), ((2, 5, 4, 8),)),
}


def drawn(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    module = make().to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_they_become_ops_and_are_what_they_were_after_undo(norm: Norm, dtype: torch.dtype) -> None:
    op, make, shapes = norm
    patched, plain = pair_of(drawn(make, dtype))
    assert patched.liger_report.replaced == {op: 1}
    for shape in shapes:
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 3 + 1).to(dtype)
        assert module_disagreements(patched, plain, x) == {}
    patched.liger_report.undo()
    torch.testing.assert_close(outcome(patched, x), outcome(plain, x), rtol=0, atol=0)


def test_under_autocast_they_run_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    patched, plain = pair_of(nn.GroupNorm(4, 32))
    monkeypatch.setattr("liger_hf.rules.norm.shaped.group_norm", lambda *args: pytest.fail("the op ran"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(2, 32, 5)
        assert torch.equal(patched(x), plain(x))


def test_a_module_that_returns_the_inverse_scale_alone_is_not_a_norm() -> None:
    (row,) = liger_hf.apply(nn.Sequential(Inverse())).rows
    assert (row.verdict, row.reason) == ("left", "it is not a norm: rows of shape (3, 7, 64) become (3, 7, 1)")


def test_a_group_norm_without_eps_is_left() -> None:
    (row,) = liger_hf.apply(nn.GroupNorm(4, 32, eps=0.0)).rows
    assert row.verdict == "left"
    assert "eps must be a finite number > 0" in row.reason


class Constant(nn.Module):
    """As OLMo's: without an attribute for eps."""

    normalized_shape = (48,)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, None, None, eps=1e-3)


class Standard(Constant):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape)


class Several(Constant):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, eps=1e-5) * 0.01


@pytest.mark.parametrize("kind", [Constant, Standard])
def test_a_norm_whose_eps_is_a_number_in_its_forward_is_replaced(kind: type[nn.Module]) -> None:
    plain, patched = kind(), kind()
    (row,) = liger_hf.apply(patched).rows
    assert (row.op, row.verdict) == ("layer_norm", "replaced")
    x = 0.01 * torch.randn(5, 48)
    assert error(patched(x), plain(x)).maximum < 1e-5


def test_a_norm_with_several_numbers_in_its_forward_is_left() -> None:
    (row,) = liger_hf.apply(Several()).rows
    assert (row.verdict, row.reason) == ("left", "its forward has several numbers that may be its eps")
