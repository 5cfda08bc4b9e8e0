# SPDX-License-Identifier: Apache-2.0
"""Weights that training leaves as they are: said once, after the first steps, with the reason."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_hf
from hf.sweep import build
from hf.test_trainer_entry import trainer
from liger_hf.without_gradient import DETACHED, FROZEN, IDLE, sentences

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.cpu


def adapted() -> Any:
    torch.manual_seed(0)
    attention, experts = ["q_proj", "v_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(build("qwen3_moe").train(), peft.LoraConfig(r=2, target_modules=attention, target_parameters=experts))  # fmt: skip


def layers(model: Any) -> Any:
    return model.base_model.model.model.layers


def warned(model: Any, folder: Path, **options: Any) -> list[str]:
    """The sentences about gradients in a run of three steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(model, folder, [liger_hf.LigerCallback(show=None)], **({"max_steps": 3} | options)).train()
    assert not any(module._forward_pre_hooks for module in model.modules())
    return [str(each.message) for each in caught if "gradient" in str(each.message)]


def test_nothing_is_said_of_experts_without_tokens(tmp_path: Path) -> None:
    model = adapted()
    # All tokens go to the first two experts.
    for layer in layers(model):
        layer.mlp.gate.weight.data = torch.zeros_like(layer.mlp.gate.weight)
    assert warned(model, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "compiled"), [(1, False), (3, True)])
def test_adapters_of_a_module_that_never_runs_are_counted(steps: int, compiled: bool, tmp_path: Path) -> None:
    model = adapted()
    for layer in layers(model):
        layer.mlp.forward = lambda hidden: 0.5 * hidden
        if compiled:
            layer.forward = torch.compile(layer.forward, backend="eager")
    expected = f"8 of 8 adapter weights of model.layers.*.mlp.experts got no gradient: {IDLE}."
    assert warned(model, tmp_path, max_steps=steps) == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_adapters_whose_output_is_detached_have_run(compiled: bool, tmp_path: Path) -> None:
    model = adapted()
    v_proj = layers(model)[1].self_attn.v_proj
    v_proj.register_forward_hook(lambda module, args, output: output.detach())
    if compiled:
        layers(model)[1].forward = torch.compile(layers(model)[1].forward, backend="eager")
    expected = f"2 of 4 adapter weights of model.layers.*.self_attn.v_proj got no gradient: {DETACHED}."
    assert warned(model, tmp_path) == [expected]


def test_an_adapter_that_is_frozen_in_some_layers_is_a_mistake(tmp_path: Path) -> None:
    model = adapted()
    layers(model)[0].requires_grad_(False)
    assert warned(model, tmp_path) == [f"8 of 16 adapter weights of model.layers.* got no gradient: {FROZEN}."]


def test_an_adapter_that_is_frozen_as_a_whole_is_none(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    model.set_adapter("second")
    assert warned(model, tmp_path) == []


def test_weights_beside_adapters_are_named_by_the_largest_module() -> None:
    tower = [f"vision.blocks.{i}.{name}" for i in range(3) for name in ("norm.weight", "mlp.up.weight")]
    text = [f"layers.{i}.{name}.weight" for i in range(3) for name in ("q", "k")]
    without = dict.fromkeys(tower, IDLE) | {"layers.2.k.weight": DETACHED}
    assert list(sentences(without, [*tower, *text])) == [
        f"6 of 6 trainable weights of vision.blocks got no gradient: {IDLE}.",
        f"1 of 3 trainable weights of layers.*.k got no gradient: {DETACHED}.",
    ]


def test_experts_in_a_loop_are_reported_if_none_of_them_ran() -> None:
    experts = [f"layers.0.experts.{i}.up.weight" for i in range(4)]
    trained = [*experts, "layers.0.norm.weight"]
    assert list(sentences(dict.fromkeys(experts[:2], IDLE), trained)) == []
    expected = f"4 of 4 trainable weights of layers.*.experts got no gradient: {IDLE}."
    assert list(sentences(dict.fromkeys(experts, IDLE), trained)) == [expected]
