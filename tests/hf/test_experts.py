# SPDX-License-Identifier: Apache-2.0
"""The gate of experts that Transformers runs through its experts interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_hf
from hf.sweep import build
from hf.tiny_models import tokens, twin
from liger_hf.rules.gated_mlp import rule as gated_mlp

pytestmark = pytest.mark.cpu


def loss(model: Any) -> torch.Tensor:
    return model(input_ids=tokens()["input_ids"], labels=tokens()["labels"]).loss


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_the_gate_of_every_implementation_is_replaced(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = gated_mlp.swiglu
    monkeypatch.setattr("liger_hf.rules.gated_mlp.rule.ACTIVATIONS", ((Spy(right, calls), {}),))
    plain = build("mixtral").train()
    plain.set_experts_implementation(implementation)
    patched = twin(plain)
    report = liger_hf.apply(patched, only=["swiglu"])
    assert report.replaced == {"swiglu": 2}
    calls.clear()
    torch.testing.assert_close(loss(patched), loss(plain))
    assert len(calls) == 2


class Spy:
    """An op that notes its calls."""

    def __init__(self, op: Any, calls: list[int]) -> None:
        self.op, self.calls, self.name = op, calls, op.name

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append(1)
        return self.op(*args, **options)


def test_experts_that_run_one_by_one_are_left_and_the_report_says_how_to_change_it() -> None:
    model = build("mixtral")
    model.set_experts_implementation("eager")
    row = next(row for row in liger_hf.apply(model).rows if row.module == "MixtralExperts")
    assert row.verdict == "left"
    assert "'eager' does not call their gate; model.set_experts_implementation('grouped_mm') does" in row.reason


def test_a_limited_gate_is_replaced() -> None:
    row = next(row for row in liger_hf.apply(build("hy_v4")).rows if row.module == "HYV4Experts")
    assert (row.op, row.reason) == ("swiglu", "outputs and gradients agree, limited by swiglu_limit")


def test_a_gate_with_a_slope_of_its_own_is_left() -> None:
    row = next(row for row in liger_hf.apply(build("gpt_oss")).rows if row.module == "GptOssExperts")
    assert "no op computes what the module does" in row.reason


def test_a_second_apply_and_undo_leave_the_gate_as_it_was() -> None:
    model = build("mixtral")
    report = liger_hf.apply(model)
    again = next(row for row in liger_hf.apply(model).rows if row.module == "MixtralExperts")
    assert again.reason == "already replaced by an earlier apply"
    report.undo()
    assert "_apply_gate" not in vars(model.model.layers[0].mlp.experts)


def test_a_copy_of_the_model_uses_its_own_experts() -> None:
    model = build("mixtral")
    liger_hf.apply(model)
    experts = twin(model).model.layers[0].mlp.experts
    assert experts._apply_gate.__self__ is experts
