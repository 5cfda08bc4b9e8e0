# SPDX-License-Identifier: Apache-2.0
"""Facts about geglu that its samples do not say."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from liger_core import geglu
from ops.agreement import disagreements, leaf

APPROXIMATIONS = pytest.mark.parametrize("approximate", ["tanh", "none"])


@APPROXIMATIONS
def test_geglu_is_gelu_of_the_gate_times_up(approximate: Literal["tanh", "none"], device: torch.device) -> None:
    def formula(gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate=approximate) * up

    arguments = {"gate": leaf(3, 50, device=device), "up": leaf(3, 50, device=device)}
    assert disagreements(lambda **a: geglu(**a, approximate=approximate), formula, **arguments) == []


@APPROXIMATIONS
def test_a_packed_tensor_is_its_two_halves(approximate: Literal["tanh", "none"], device: torch.device) -> None:
    def split(packed: Tensor) -> Tensor:
        return geglu.reference(*packed.chunk(2, dim=-1), approximate=approximate)

    assert (
        disagreements(
            lambda packed: geglu(packed, approximate=approximate), split, packed=leaf(5, 2 * 37, device=device)
        )
        == []
    )


def test_tanh_is_the_default_and_differs_from_the_exact_gelu(device: torch.device) -> None:
    gate, up = torch.randn(4, 64, device=device), torch.ones(4, 64, device=device)
    assert torch.equal(geglu(gate, up), geglu(gate, up, approximate="tanh"))
    difference = (geglu(gate, up) - geglu(gate, up, approximate="none")).abs().max()
    assert 1e-5 < difference < 1e-2


@APPROXIMATIONS
def test_large_gates_pass_or_close(approximate: Literal["tanh", "none"], device: torch.device) -> None:
    gate = torch.tensor([100.0, -100.0], device=device)
    assert geglu(gate, torch.ones(2, device=device), approximate=approximate).abs().tolist() == [100.0, 0.0]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    draw=st.integers(0, 99),
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    width=st.integers(1, 90),
    approximate=st.sampled_from(["tanh", "none"]),
)
def test_any_shape_is_the_naive_formula(
    device: torch.device, draw: int, shape: list[int], width: int, approximate: Literal["tanh", "none"]
) -> None:
    torch.manual_seed(draw)

    def naive(gate: Tensor, up: Tensor) -> Tensor:
        if approximate == "none":
            return gate * torch.special.erfc(-gate / math.sqrt(2)) / 2 * up
        # g/2 · (1 + tanh(z)) = g · sigmoid(2z), which loses nothing where tanh is close to -1.
        return gate * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)) * up

    arguments = {"gate": leaf(*shape, width, device=device), "up": leaf(*shape, width, device=device)}
    assert disagreements(lambda **a: geglu(**a, approximate=approximate), naive, **arguments) == []
