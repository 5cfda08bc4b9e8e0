# SPDX-License-Identifier: Apache-2.0
"""Facts about geglu that its samples do not say."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
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
def test_large_gates_pass_or_close(approximate: Literal["tanh", "none"], device: torch.device) -> None:
    gate = torch.tensor([100.0, -100.0], device=device)
    assert geglu(gate, torch.ones(2, device=device), approximate=approximate).abs().tolist() == [100.0, 0.0]
