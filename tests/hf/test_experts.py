# SPDX-License-Identifier: Apache-2.0
"""Experts that Transformers runs through its experts interface: the whole module becomes one op, or its gate does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import liger_hf
from hf.sweep import build
from hf.tiny_models import checkpoint_layers, patched_twin, rows_of, step, tokens, twin
from liger_core.accuracy import error
from liger_hf.report import Row
from liger_hf.rules.experts import rule
from liger_hf.rules.gated_mlp import rule as gated_mlp

pytestmark = [pytest.mark.slow, pytest.mark.cpu]
GATES = ("swiglu", "geglu")


def loss(model: Any) -> torch.Tensor:
    return model(**tokens()).loss


def row_of(report: Any, module: str, op: str = "experts") -> Row:
    return next(row for row in rows_of(report, op) if row.module == module)


class Watched:
    """An op that notes the arguments of its calls."""

    def __init__(self, op: Any, calls: list[Any]) -> None:
        self.op, self.calls, self.name = op, calls, op.name

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append((args, options))
        return self.op(*args, **options)


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


def test_the_op_runs_in_every_layer(arguments: list[Any]) -> None:
    plain = build("mixtral").train()
    patched = patched_twin(plain)
    arguments.clear()
    torch.testing.assert_close(loss(patched), loss(plain))
    assert len(arguments) == 2


def test_an_implementation_that_was_chosen_stays_and_the_report_says_how_to_change_it() -> None:
    model = build("mixtral")
    model.set_experts_implementation("batched_mm")
    report = liger_hf.apply(model)
    row, how = row_of(report, "MixtralExperts"), "model.set_experts_implementation('grouped_mm') lets the op replace it"
    assert row.verdict == "left"
    assert f"'batched_mm' was chosen; {how}" in row.reason
    assert row_of(report, "MixtralExperts", "swiglu").verdict == "replaced"


def test_an_implementation_that_is_chosen_later_runs(arguments: list[Any]) -> None:
    # generate() does that for the tokens that it computes one by one.
    model = build("mixtral")
    liger_hf.apply(model)
    model.set_experts_implementation("batched_mm")
    arguments.clear()
    loss(model)
    assert arguments == []


# What is adapted, and what the op gets of it.
TARGETS = {
    "both": (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], {"gate_up_a", "gate_up_b", "down_a", "down_b"}),
    "down": (["mlp.experts.down_proj"], {"down_a", "down_b"}),
}


def adapted(model_type: str, targets: list[str], dtype: torch.dtype = torch.float32) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=[], target_parameters=targets, init_lora_weights=False)
    return peft.get_peft_model(build(model_type).to(dtype).train(), config)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in step(model, **tokens()).items() if name != "loss"}


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each call of the op."""
    found: list[Any] = []
    monkeypatch.setattr(rule, "experts", Watched(rule.experts, found))
    return found


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_lora_on_experts_has_the_gradients_of_peft(
    model_type: str, targets: str, checkpointed: bool, arguments: list[Any]
) -> None:
    names, factors = TARGETS[targets]
    plain = adapted(model_type, names)
    patched = patched_twin(plain)
    for model in (plain, patched):
        if checkpointed:
            model.enable_input_require_grads()
            checkpoint_layers(model)
    expected, expected_loss = gradients(plain), loss(plain)
    arguments.clear()
    got, got_loss = gradients(patched), loss(patched)
    assert len(arguments) == (6 if checkpointed else 4)
    assert all({name for name in options if name.endswith(("_a", "_b"))} == factors for _, options in arguments)
    torch.testing.assert_close(got_loss, expected_loss)
    assert len(got) == 2 * len(factors)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_lora_on_experts_adds_to_no_matrix_and_asks_for_no_gradient_of_one(arguments: list[Any]) -> None:
    model = adapted("qwen3_moe", TARGETS["both"][0])
    liger_hf.apply(model)
    arguments.clear()
    loss(model).backward()
    experts = next(module for module in model.modules() if type(module).__name__ == "Qwen3MoeExperts")
    (_, gate_up, down, *_), _ = arguments[0]
    assert (gate_up.data_ptr(), down.data_ptr()) == (experts.gate_up_proj.data_ptr(), experts.down_proj.data_ptr())
    assert [gate_up.requires_grad, down.requires_grad] == [False, False]


def test_in_bfloat16_gradients_of_adapters_of_experts_are_as_close_to_float32_as_those_of_peft() -> None:
    model = adapted("mixtral", TARGETS["both"][0], torch.bfloat16)
    wanted, plain = gradients(twin(model).float()), twin(model)
    liger_hf.apply(model, only=["experts"])
    found = [gradients(each) for each in (model, plain)]
    ours, theirs = (sum(error(each[name], wanted[name]).frobenius for name in each) for each in found)
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("change", ["disabled", "merged", "two"])
def test_what_is_active_on_experts_is_looked_at_in_every_call(change: str, arguments: list[Any]) -> None:
    model = adapted("mixtral", TARGETS["both"][0])
    if change == "two":
        model.add_adapter("other", model.peft_config["default"])
    plain = twin(model)
    liger_hf.apply(model)
    for m in (model, plain):
        if change == "disabled":
            m.base_model.disable_adapter_layers()
        elif change == "merged":
            m.merge_adapter()
        else:
            m.base_model.set_adapter(["default", "other"])
    arguments.clear()
    torch.testing.assert_close(loss(model), loss(plain))
    assert len(arguments) == 2
    assert all("down_a" not in options for _, options in arguments)


class Wrapper(torch.nn.Module):
    """Holds a module without its attributes, as DistributedDataParallel does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def wrapped(model: Any, wrap: Callable[[torch.nn.Module], Any]) -> Any:
    for layer in model.model.layers:
        layer.mlp.experts = wrap(layer.mlp.experts)
    return model


WRAPPED: dict[str, Callable[[str], Any]] = {
    "adapted": lambda model_type: adapted(model_type, ["mlp.experts.down_proj"]),
    "adapted_twice": lambda model_type: adapted(model_type, TARGETS["both"][0]),
    "module": lambda model_type: wrapped(build(model_type), Wrapper),
    "modules": lambda model_type: wrapped(build(model_type), lambda experts: Wrapper(Wrapper(experts))),
    "compiled": lambda model_type: wrapped(build(model_type), torch.compile),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_no_row_says_that_experts_are_left_which_are_replaced_in_a_wrapper(model_type: str, wrapper: str) -> None:
    report = liger_hf.inspect(WRAPPED[wrapper](model_type), only=["experts"], verify=False)
    assert [row.verdict for row in rows_of(report, "experts")] == ["replaceable"]


@pytest.mark.parametrize("model_type", ["seq2seq:switch_transformers", "seq2seq:nllb-moe"])
def test_experts_in_a_wrapper_that_no_rule_takes_are_left_with_a_reason(model_type: str) -> None:
    model = build(model_type)
    blocks = [block for block in model.modules() if isinstance(getattr(block, "experts", None), torch.nn.ModuleDict)]
    for block in blocks:
        block.experts = Wrapper(block.experts)
    rows = rows_of(liger_hf.inspect(model, only=["experts"], verify=False), "experts")
    assert sum(row.count for row in rows if row.verdict == "left") == len(blocks) > 0


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_the_gate_of_every_implementation_is_replaced(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    right = gated_mlp.swiglu
    monkeypatch.setattr("liger_hf.rules.gated_mlp.rule.ACTIVATIONS", ((Watched(right, calls), {}),))
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


LIMITED = {"hy_v4": "outputs and gradients agree, limited by swiglu_limit", "gpt_oss": "no op matches. Closest: "}


@pytest.mark.parametrize(("model_type", "reason"), LIMITED.items(), ids=LIMITED)
def test_a_limited_gate_is_replaced_and_one_with_a_slope_of_its_own_is_left(model_type: str, reason: str) -> None:
    row = row_of(liger_hf.apply(build(model_type), only=GATES), LAYOUTS[model_type][0], "swiglu")
    assert row.reason.startswith(reason)


UNITS = {
    "falcon_h1": ("FalconH1MLP", "swiglu", "scaled by gate_multiplier and down_multiplier"),
    "minimax_m3_vl_text": ("MiniMaxM3VLDenseMLP", "swiglu", "limited by swiglu_limit, with swiglu_alpha and up + 1"),
    "bitnet": ("BitNetMLP", "relu_squared", "with a gate"),
}


@pytest.mark.parametrize("model_type", UNITS)
def test_gated_mlps_with_options_of_their_own_are_replaced_and_run_the_op(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, op, detail = UNITS[model_type]
    model, found = build(model_type), []
    modules = [module for module in model.modules() if type(module).__name__ == name]
    for module in modules:
        if op == "swiglu" and hasattr(module, "gate_multiplier"):
            # In the first draw of a check the original rounds luckily with these.
            module.gate_multiplier, module.down_multiplier = 0.5, 0.25
    row = row_of(liger_hf.apply(model, only=[op]), name, op)
    assert (row.verdict, row.reason) == ("replaced", f"outputs and gradients agree, {detail}")
    monkeypatch.setattr(gated_mlp, op, Watched(getattr(gated_mlp, op), found))
    modules[0](torch.randn(2, 3, model.config.hidden_size))
    assert len(found) == 1


def test_under_autocast_experts_compute_in_the_dtype_of_their_weights_as_in_transformers(arguments: list[Any]) -> None:
    torch.manual_seed(0)
    plain = build("mixtral").train()
    patched = patched_twin(plain)
    arguments.clear()
    experts = [next(m for m in model.modules() if type(m).__name__ == "MixtralExperts") for model in (plain, patched)]
    hidden, index = torch.randn(30, plain.config.hidden_size), torch.stack([torch.randperm(4)[:2] for _ in range(30)])
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (module(hidden, index, torch.rand(30, 2, generator=torch.manual_seed(1))) for module in experts)
    assert arguments
    assert got.dtype == expected.dtype
    assert error(got, expected).maximum < 1e-5
