# SPDX-License-Identifier: Apache-2.0
"""Norms that a forward scales and shifts are computed in one step, where its source says so and nobody watches the
norm."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2RMSNorm
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.vibevoice import VibeVoiceConfig
from transformers.models.vibevoice.modeling_vibevoice import VibeVoiceDiffusionHeadAdaLayerNorm

import liger_hf
from hf.tiny_models import module_disagreements, outcome, pair_of, recorded
from liger_hf.rules.modulation import rule as modulation

pytestmark = pytest.mark.cpu

WIDTH = 48


class Block(nn.Module):
    """Two norms between other modules, as in ESMFold2's atom layers; the conditioning has one row for each sample."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = norm(), norm()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, other_shift, other_scale = self.linear(condition).unsqueeze(1).chunk(4, dim=-1)
        x = x + self.mix(self.first(x) * (1 + scale) + shift)
        return x + self.mix(self.second(x) * (1.0 + other_scale) + other_shift)


def vibevoice() -> nn.Module:
    config = VibeVoiceConfig()
    config.hidden_size, config.intermediate_size, config.hidden_act = WIDTH, 64, "silu"
    config.mlp_bias, config.rms_norm_eps = False, 1e-5
    return VibeVoiceDiffusionHeadAdaLayerNorm(config)


# Module, op, how many norms it modulates, and whether the condition has a row for each token.
MODULES: dict[str, tuple[Any, str, int, bool]] = {
    "qwen_omni_first": (lambda: omni.Qwen2_5_OmniAdaLayerNormZero(WIDTH), "modulated_layer_norm", 1, False),
    "qwen_omni_last": (lambda: omni.Qwen2_5_OmniAdaLayerNormZero_Final(WIDTH), "modulated_layer_norm", 1, False),
    "vibevoice": (vibevoice, "modulated_rms_norm", 1, True),
    "block_of_esmfold2": (lambda: Block(EsmFold2RMSNorm), "modulated_rms_norm", 2, False),
    "block_with_layer_norms": (lambda: Block(lambda: nn.LayerNorm(WIDTH, elementwise_affine=False)), "modulated_layer_norm", 2, False),
    "block_with_weights": (lambda: Block(lambda: nn.RMSNorm(WIDTH, eps=1e-6)), "modulated_rms_norm", 2, False),
}  # fmt: skip
EACH = pytest.mark.parametrize(("make", "op", "count", "tokens"), MODULES.values(), ids=MODULES)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each modulated norm that a patched module computes, whether by the op."""
    return recorded(monkeypatch, modulation, "_fit", after=lambda fits, *args: fits)


def drawn(make: Any, dtype: torch.dtype) -> nn.Module:
    module = make()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.5))
    return module.to(dtype)


def inputs(tokens: bool, dtype: torch.dtype) -> list[Tensor]:
    """Rows, and a condition for each token or for each sample."""
    generator = torch.Generator().manual_seed(1)
    shapes = (3, 5, WIDTH), (3, 5, WIDTH) if tokens else (3, WIDTH)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_modulated_norm_is_one_op_as_accurate_as_before_and_undo_restores_it(
    make: Any, op: str, count: int, tokens: bool, dtype: torch.dtype, calls: Any
) -> None:
    (patched, plain), given = pair_of(drawn(make, dtype), only=[op]), inputs(tokens, dtype)
    assert patched.liger_report.replaced == {op: 1}
    assert module_disagreements(patched, plain, *given) == {}
    assert calls == [True] * count
    patched.liger_report.undo()
    calls.clear()
    torch.testing.assert_close(outcome(patched, *given), outcome(plain, *given), rtol=0, atol=0)
    assert calls == []


class Other(Block):
    """Scales by something else than 1 + scale."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, *_ = self.linear(condition).unsqueeze(1).chunk(4, dim=-1)
        return self.mix(self.first(x) * (2 + scale) + shift)


class Clipped(nn.Module):
    """Not a norm, in spite of its eps."""

    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).clamp(-1, 1)


def reasons(module: nn.Module) -> list[str]:
    return [row.reason for row in liger_hf.apply(nn.Sequential(module)).rows if row.op.startswith("modulated")]


def test_what_the_op_does_not_compute_is_left_with_a_reason() -> None:
    assert reasons(Other(EsmFold2RMSNorm)) == []
    assert reasons(Block(lambda: nn.LayerNorm(WIDTH))) == ["first: modulated_layer_norm has neither weight nor bias"]
    (reason,) = reasons(Block(Clipped))
    assert reason.startswith("no op matches. Closest: modulated_rms_norm. ")
    mixed = Block(EsmFold2RMSNorm)
    mixed.second = nn.RMSNorm(WIDTH, eps=1e-6)
    assert reasons(mixed) == ["the norms that it scales and shifts must be of one class, first, second are not"]
    watched = Block(EsmFold2RMSNorm)
    watched.first.register_forward_hook(lambda child, given, y: None)
    assert reasons(watched) == ["first: the norm has hooks, which the fused op would skip"]


def test_a_hook_that_is_put_on_the_norm_later_runs(calls: Any) -> None:
    module = Block(EsmFold2RMSNorm)
    liger_hf.apply(module)
    seen: list[Tensor] = []
    module.first.register_forward_hook(lambda child, given, y: seen.append(y))
    module(torch.randn(2, 3, WIDTH), torch.randn(2, WIDTH))
    assert (len(seen), calls) == (1, [True])


def test_a_scale_of_another_dtype_or_under_autocast_is_computed_as_before(calls: Any) -> None:
    module, plain = pair_of(Block(EsmFold2RMSNorm), only=["modulated_rms_norm"])
    x, condition = torch.randn(2, 3, WIDTH), torch.randn(2, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x, condition), plain(x, condition))
    for each in (module, plain):
        each.linear.bfloat16()
    assert torch.equal(module(x, condition.bfloat16()), plain(x, condition.bfloat16()))
    assert calls == [False] * 4
