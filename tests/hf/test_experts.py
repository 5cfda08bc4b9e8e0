# SPDX-License-Identifier: Apache-2.0
"""Experts that Transformers runs through its experts interface: the whole module becomes one op, or its gate does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import liger_hf
from hf.sweep import build
from hf.tiny_models import checkpoint_layers, pair_of, patched_twin, recorded, rows_of, step, tokens, twin, watched
from liger_core.accuracy import error
from liger_hf.report import Row
from liger_hf.rules.experts import rule
from liger_hf.rules.gated_mlp import rule as gated_mlp

pytestmark = [pytest.mark.slow, pytest.mark.cpu]
GATES = ("swiglu", "geglu")


def loss(model: Any) -> torch.Tensor:
    return model(**{name: value.to(model.device) for name, value in tokens().items()}).loss


def row_of(report: Any, module: str, op: str = "experts") -> Row:
    return next(row for row in rows_of(report, op) if row.module == module)


def test_experts_with_another_activation_are_checked_on_their_own() -> None:
    model = build("mixtral")
    model.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    assert liger_hf.apply(model, only=["experts"]).replaced == {"experts": 1}


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
    return recorded(monkeypatch, rule, "experts", lambda *args, **options: (args, options))


# Each layout of the experts, with and without checkpointing, with each choice of targets.
LORA = pytest.mark.parametrize(
    ("model_type", "targets", "checkpointed"),
    [("mixtral", "both", False), ("mixtral", "down", True), ("gpt_oss", "both", True), ("gpt_oss", "down", False)],
)


@LORA
def test_lora_on_experts_has_the_gradients_of_peft(
    model_type: str, targets: str, checkpointed: bool, arguments: list[Any]
) -> None:
    names, factors = TARGETS[targets]
    patched, plain = pair_of(adapted(model_type, names))
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
    "adapted": lambda model_type: adapted(model_type, TARGETS["both"][0]),
    "modules": lambda model_type: wrapped(build(model_type), lambda experts: Wrapper(Wrapper(experts))),
    "compiled": lambda model_type: wrapped(build(model_type), torch.compile),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_no_row_says_that_experts_are_left_which_are_replaced_in_a_wrapper(model_type: str, wrapper: str) -> None:
    report = liger_hf.inspect(WRAPPED[wrapper](model_type), only=["experts"], verify=False)
    assert [row.verdict for row in rows_of(report, "experts")] == ["replaceable"]


def test_experts_in_a_wrapper_that_no_rule_takes_are_left_with_a_reason() -> None:
    model = build("seq2seq:switch_transformers")
    blocks = [block for block in model.modules() if isinstance(getattr(block, "experts", None), torch.nn.ModuleDict)]
    for block in blocks:
        block.experts = Wrapper(block.experts)
    rows = rows_of(liger_hf.inspect(model, only=["experts"], verify=False), "experts")
    assert sum(row.count for row in rows if row.verdict == "left") == len(blocks) > 0


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_the_gate_of_every_implementation_is_replaced(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(gated_mlp, "ACTIVATIONS", ((watched(gated_mlp.swiglu, calls), {}),))
    plain = build("mixtral").train()
    plain.set_experts_implementation(implementation)
    patched = patched_twin(plain, only=["swiglu"])
    assert patched.liger_report.replaced == {"swiglu": 2}
    calls.clear()
    torch.testing.assert_close(loss(patched), loss(plain))
    assert len(calls) == 2


def test_a_gate_that_no_implementation_calls_is_left_and_the_report_says_how_to_change_it() -> None:
    model = build("mixtral")
    model.set_experts_implementation("eager")
    row = row_of(liger_hf.apply(model, only=GATES), "MixtralExperts", "swiglu")
    assert row.verdict == "left"
    assert "'eager' does not call their gate; model.set_experts_implementation('grouped_mm') does" in row.reason


LIMITED = {
    "hy_v4": ("HYV4Experts", "outputs and gradients agree, limited by swiglu_limit"),
    "gpt_oss": ("GptOssExperts", "no op matches. Closest: "),
}


@pytest.mark.parametrize("model_type", LIMITED)
def test_a_limited_gate_is_replaced_and_one_with_a_slope_of_its_own_is_left(model_type: str) -> None:
    module, reason = LIMITED[model_type]
    row = row_of(liger_hf.apply(build(model_type), only=GATES), module, "swiglu")
    assert row.reason.startswith(reason)


def test_under_autocast_experts_compute_in_the_dtype_of_their_weights_as_in_transformers(arguments: list[Any]) -> None:
    torch.manual_seed(0)
    patched, plain = pair_of(build("mixtral").train())
    arguments.clear()
    experts = [next(m for m in model.modules() if type(m).__name__ == "MixtralExperts") for model in (plain, patched)]
    hidden, index = torch.randn(30, plain.config.hidden_size), torch.stack([torch.randperm(4)[:2] for _ in range(30)])
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (module(hidden, index, torch.rand(30, 2, generator=torch.manual_seed(1))) for module in experts)
    assert arguments
    assert got.dtype == expected.dtype
    assert error(got, expected).maximum < 1e-5
