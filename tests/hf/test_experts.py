# SPDX-License-Identifier: Apache-2.0
"""Experts that Transformers runs through its experts interface: the whole module becomes one op, or its gate does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import liger_hf
from hf.sweep import build
from hf.tiny_models import tokens, twin
from liger_hf.report import Row
from liger_hf.rules.experts import rule
from liger_hf.rules.gated_mlp import rule as gated_mlp

pytestmark = pytest.mark.cpu
GATES = ("swiglu", "geglu")


def loss(model: Any) -> torch.Tensor:
    return model(input_ids=tokens()["input_ids"], labels=tokens()["labels"]).loss


def row_of(report: Any, module: str, op: str = "experts") -> Row:
    return next(row for row in report.rows if (row.module, row.op) == (module, op))


class Spy:
    """An op that notes its calls."""

    def __init__(self, op: Any, calls: list[int]) -> None:
        self.op, self.calls, self.name = op, calls, op.name

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append(1)
        return self.op(*args, **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call of the op."""
    found: list[int] = []
    monkeypatch.setattr(rule, "experts", Spy(rule.experts, found))
    return found


LAYOUTS = {
    "mixtral": ("MixtralExperts", ""),
    "hy_v4": ("HYV4Experts", ", limited by swiglu_limit"),
    "gpt_oss": ("GptOssExperts", ", limited by limit, with the slope alpha"),
    "nemotron_h": ("NemotronHExperts", ", activation='relu_squared'"),
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_experts_become_the_op_however_they_are_stored_and_activated(model_type: str) -> None:
    module, detail = LAYOUTS[model_type]
    row = row_of(liger_hf.apply(build(model_type)), module)
    assert (row.verdict, row.reason) == ("replaced", f"outputs and gradients agree{detail}")


def test_the_report_does_not_mention_the_gate_of_experts_that_are_replaced() -> None:
    report = liger_hf.apply(build("mixtral"))
    assert [row.op for row in report.rows if row.module == "MixtralExperts"] == ["experts"]


def test_the_op_runs_in_every_layer(calls: list[int]) -> None:
    plain = build("mixtral").train()
    patched = twin(plain)
    liger_hf.apply(patched)
    calls.clear()
    torch.testing.assert_close(loss(patched), loss(plain))
    assert len(calls) == 2


def test_an_implementation_that_was_chosen_stays_and_the_report_says_how_to_change_it() -> None:
    model = build("mixtral")
    model.set_experts_implementation("batched_mm")
    report = liger_hf.apply(model)
    row = row_of(report, "MixtralExperts")
    assert row.verdict == "left"
    assert "'batched_mm' was chosen; model.set_experts_implementation('grouped_mm') lets the op replace it" in row.reason
    assert row_of(report, "MixtralExperts", "swiglu").verdict == "replaced"


def test_an_implementation_that_is_chosen_later_runs(calls: list[int]) -> None:
    # generate() does that for the tokens that it computes one by one.
    model = build("mixtral")
    liger_hf.apply(model)
    model.set_experts_implementation("batched_mm")
    calls.clear()
    loss(model)
    assert calls == []


def test_an_activation_that_something_watches_is_called(calls: list[int]) -> None:
    model = build("mixtral")
    liger_hf.apply(model)
    seen: list[int] = []
    model.model.layers[0].mlp.experts.act_fn.register_forward_hook(lambda *_: seen.append(1))
    calls.clear()
    loss(model)
    assert seen
    assert len(calls) == 1


def test_a_second_apply_changes_nothing_and_undo_restores_the_forward() -> None:
    model = build("mixtral")
    report = liger_hf.apply(model)
    again = row_of(liger_hf.apply(model), "MixtralExperts")
    assert again.reason == "already replaced by an earlier apply"
    report.undo()
    assert "forward" not in vars(model.model.layers[0].mlp.experts)


def test_a_copy_of_the_model_uses_its_own_experts() -> None:
    model = build("mixtral")
    liger_hf.apply(model)
    other = twin(model)
    with torch.no_grad():
        for parameter in other.model.layers[0].mlp.experts.parameters():
            parameter.mul_(2)
    experts = other.model.layers[0].mlp.experts
    assert experts.forward.__self__ is experts
    assert not torch.equal(loss(other), loss(model))


def test_lora_on_experts_trains_through_the_op(calls: list[int]) -> None:
    peft = pytest.importorskip("peft")
    plain = build("mixtral").train()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    adapted = peft.get_peft_model(plain, config)
    expected = loss(adapted)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in adapted.named_parameters() if p.grad is not None}
    adapted.zero_grad()
    liger_hf.apply(adapted)
    calls.clear()
    got = loss(adapted)
    got.backward()
    assert len(calls) == 2
    torch.testing.assert_close(got, expected)
    assert any("lora" in n for n in gradients)
    for name, parameter in adapted.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


# -- the gate alone


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_the_gate_of_every_implementation_is_replaced(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
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


def test_a_gate_that_no_implementation_calls_is_left_and_the_report_says_how_to_change_it() -> None:
    model = build("mixtral")
    model.set_experts_implementation("eager")
    row = row_of(liger_hf.apply(model, only=GATES), "MixtralExperts", "swiglu")
    assert row.verdict == "left"
    assert "'eager' does not call their gate; model.set_experts_implementation('grouped_mm') does" in row.reason


def test_a_limited_gate_is_replaced() -> None:
    row = row_of(liger_hf.apply(build("hy_v4"), only=GATES), "HYV4Experts", "swiglu")
    assert row.reason == "outputs and gradients agree, limited by swiglu_limit"


def test_a_gate_with_a_slope_of_its_own_is_left() -> None:
    row = row_of(liger_hf.apply(build("gpt_oss"), only=GATES), "GptOssExperts", "swiglu")
    assert "no op computes what the module does" in row.reason


def test_a_second_apply_and_undo_leave_the_gate_as_it_was() -> None:
    model = build("mixtral")
    report = liger_hf.apply(model, only=GATES)
    again = row_of(liger_hf.apply(model, only=GATES), "MixtralExperts", "swiglu")
    assert again.reason == "already replaced by an earlier apply"
    report.undo()
    assert "_apply_gate" not in vars(model.model.layers[0].mlp.experts)


def test_a_copy_of_the_model_uses_its_own_gate() -> None:
    model = build("mixtral")
    liger_hf.apply(model, only=GATES)
    experts = twin(model).model.layers[0].mlp.experts
    assert experts._apply_gate.__self__ is experts


UNITS = {
    "falcon_h1": ("FalconH1MLP", "swiglu", "scaled by gate_multiplier and down_multiplier"),
    "minimax_m3_vl_text": ("MiniMaxM3VLDenseMLP", "swiglu", "limited by swiglu_limit, with swiglu_alpha and up + 1"),
    "bitnet": ("BitNetMLP", "relu_squared", "with a gate"),
}


@pytest.mark.parametrize("model_type", UNITS)
def test_gated_mlps_with_options_of_their_own_are_replaced_and_run_the_op(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, op, detail = UNITS[model_type]
    model, found = build(model_type), []
    modules = [module for module in model.modules() if type(module).__name__ == name]
    for module in modules:
        if op == "swiglu" and hasattr(module, "gate_multiplier"):
            module.gate_multiplier, module.down_multiplier = 0.7, 0.3
    row = row_of(liger_hf.apply(model, only=[op]), name, op)
    assert (row.verdict, row.reason) == ("replaced", f"outputs and gradients agree, {detail}")
    monkeypatch.setattr(gated_mlp, op, Spy(getattr(gated_mlp, op), found))
    modules[0](torch.randn(2, 3, model.config.hidden_size))
    assert found == [1]
