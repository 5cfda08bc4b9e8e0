# SPDX-License-Identifier: Apache-2.0
"""Norms that take a gate, or that work on groups of a row: replaced if an op computes all of them, else left."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

import liger_hf
from hf.test_verification import normed as unit
from hf.tiny_models import module_disagreements


def in_groups(x: Tensor) -> Tensor:
    return unit(x.unflatten(-1, (-1, 8))).flatten(-2)


class GatedNorm(nn.Module):
    """A norm with a gate; formula(x, gate, weight) gets x and the gate in float32."""

    def __init__(self, formula: Callable[[Tensor, Tensor, Tensor], Tensor], group_size: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.eps = 1e-6
        self.formula = formula
        if group_size is not None:
            self.group_size = group_size

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = torch.full_like(x, 3.0, dtype=torch.float32) if gate is None else gate.to(torch.float32)
        return self.formula(x.to(torch.float32), wide, self.weight).to(x.dtype)


# Formula and group size.
Form = tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int | None]
FORMS: dict[str, Form] = {
    "silu_after": (lambda x, gate, weight: unit(x).to(weight.dtype) * weight * silu(gate), None),
    "sigmoid_after": (lambda x, gate, weight: unit(x) * weight * gate.sigmoid(), None),
    "silu_before": (lambda x, gate, weight: unit(x * silu(gate)) * weight, None),
    "sigmoid_before": (lambda x, gate, weight: unit(x * gate.sigmoid()) * weight, None),
    "silu_before_groups": (lambda x, gate, weight: in_groups(x * silu(gate)) * weight, 8),
}
OTHERS: dict[str, Form] = {
    "gelu": (lambda x, gate, weight: unit(x) * weight * gelu(gate), None),
    "detached_gate": (lambda x, gate, weight: unit(x) * weight * silu(gate.detach()), None),
    "limited_gate": (lambda x, gate, weight: unit(x) * weight * silu(gate.clamp(max=1.5)), None),
    "unused_groups": (lambda x, gate, weight: unit(x * silu(gate)) * weight, 8),
    "other_groups": (lambda x, gate, weight: in_groups(x * silu(gate)) * weight, 16),
    "unused_gate": (lambda x, gate, weight: unit(x) * weight + 0 * gate, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_gated_norm_has_the_outputs_and_gradients_of_the_plain_one(form: Form, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(4, 9, 32, generator=generator).to(dtype) for _ in range(2)]
    plain, patched = GatedNorm(*form).to(dtype), GatedNorm(*form).to(dtype)
    assert liger_hf.apply(patched).replaced == {"gated_rms_norm": 1}
    assert module_disagreements(patched, plain, *values) == {}


@pytest.mark.parametrize("form", OTHERS.values(), ids=OTHERS.keys())
def test_a_norm_with_another_gate_is_left(form: Form) -> None:
    assert liger_hf.apply(nn.Sequential(GatedNorm(*form))).replaced == {}


@pytest.mark.parametrize(
    "formula", [lambda x, mask, weight: unit(x) * weight, OTHERS["detached_gate"][0]], ids=["unused", "detached"]
)
def test_a_second_argument_that_is_not_a_gate_is_named(formula: Callable[..., Tensor]) -> None:
    class Masked(GatedNorm):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x, mask)

    (row,) = liger_hf.apply(nn.Sequential(Masked(formula, None))).rows
    assert row.reason == "the second argument of a norm must be a gate with a gradient, mask gets none"


def test_a_gated_norm_without_its_gate_is_computed_as_before() -> None:
    plain, patched, x = GatedNorm(*FORMS["silu_after"]), GatedNorm(*FORMS["silu_after"]), torch.randn(3, 32)
    liger_hf.apply(patched)
    assert torch.equal(patched(x), plain(x))
    assert torch.equal(patched(x, gate=None), plain(x, None))
    # A gate that is broadcast was not among the checked calls.
    gate = torch.randn(3, 1)
    assert torch.equal(patched(x=x, gate=gate), plain(x, gate))


def test_float32_rows_beside_a_narrow_gate_keep_their_precision() -> None:
    plain, patched = (GatedNorm(*FORMS["silu_before"]).bfloat16() for _ in range(2))
    liger_hf.apply(patched)
    x, gate = torch.randn(3, 32), torch.randn(3, 32).bfloat16()
    result = patched(x, gate)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, plain(x, gate))
