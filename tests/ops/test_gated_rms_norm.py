# SPDX-License-Identifier: Apache-2.0
"""Facts about gated_rms_norm that its samples do not say."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from liger_core import gated_rms_norm
from ops.agreement import disagreements, leaf

MODELS = {
    "qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated": {},
    "mamba2.modeling_mamba2.MambaRMSNormGated": {"gate_first": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_gated_rms_norm_is_that_of_transformers(name: str, device: torch.device) -> None:
    file, kind = name.rsplit(".", 1)
    norm = getattr(pytest.importorskip(f"transformers.models.{file}"), kind)
    # Transformers 5.24 computes Mamba2's norm in groups.
    groups = {"group_size": 48} if "group_size" in inspect.signature(norm).parameters else {}
    module: nn.Module = norm(48, **groups)

    def formula(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (x, gate))

    given = {"x": leaf(5, 48, device=device), "gate": leaf(5, 48, device=device), "weight": leaf(48, device=device)}
    assert disagreements(lambda **named: gated_rms_norm(**named, **MODELS[name]), formula, **given) == []
