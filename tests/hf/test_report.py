# SPDX-License-Identifier: Apache-2.0
"""The report shows what was replaced, what was not, and why; models that no rule knows keep working."""

import json
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import liger_hf
from hf.tiny_configs import tiny_config
from hf.tiny_models import COMMON, make, recorded, tokens
from liger_core import rms_norm, swiglu
from liger_core.versions import warn_if_untested
from liger_hf import application

pytestmark = pytest.mark.cpu


def test_a_row_has_pattern_count_class_op_backend_and_reason() -> None:
    rows = {row.pattern: row for row in liger_hf.apply(make("gemma2")).rows}
    row = rows["model.layers.*.pre_feedforward_layernorm"]
    facts = (row.count, row.module, row.op, row.backend, row.verdict)
    assert facts == (2, "Gemma2RMSNorm", "rms_norm", "reference", "replaced")
    assert row.reason == "outputs and gradients agree, weight_offset=1, cast='float32'"
    assert rows["model.layers.*.mlp"].reason == "outputs and gradients agree, approximate='tanh'"
    assert rows["(the model itself)"].op == "linear_cross_entropy"


def test_the_report_is_plain_data_and_text() -> None:
    report = liger_hf.apply(make())
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["model"] == "LlamaForCausalLM"
    assert {row["pattern"] for row in data["rows"]} == {row.pattern for row in report.rows}
    assert "model.layers.*.input_layernorm" in str(report)
    counts = "1 × linear_cross_entropy, 2 × add_rms_norm, 2 × rope, 2 × swiglu, 5 × rms_norm"
    assert str(report).startswith(f"LlamaForCausalLM: {counts} replaced\n")


@pytest.mark.parametrize(
    "chosen",
    [
        {"only": ["rms_norm", "swiglu"]},
        {"only": (rms_norm, swiglu)},
        {"exclude": ["add_rms_norm", "rope", "linear_cross_entropy"]},
    ],
)
def test_only_the_requested_ops_are_replaced(chosen: dict[str, Any]) -> None:
    report = liger_hf.apply(make(), **chosen)
    assert report.replaced.keys() == {"rms_norm", "swiglu"}
    reason = "excluded by exclude=" if "exclude" in chosen else "not listed in only="
    left = {row.op: row.reason for row in report.rows if row.verdict == "left"}
    assert left == dict.fromkeys(("add_rms_norm", "rope", "linear_cross_entropy"), reason)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({"exclude": ["swiglu"]}, "swiglu fits, but is excluded by exclude="),
        ({"only": ["geglu", "rope"]}, "swiglu fits, but is not listed in only="),
    ],
)
def test_an_unwanted_op_that_fits_is_named(chosen: dict[str, Any], reason: str) -> None:
    report = liger_hf.inspect(make(), **chosen)
    assert {row.reason for row in report.rows if row.pattern == "model.layers.*.mlp"} == {reason}
    assert report.absent == ({"geglu": "swiglu fits instead"} if "only" in chosen else {})


@pytest.mark.parametrize("hooked", [(1,), (0, 2)])
def test_a_row_names_its_layers_if_others_have_another_outcome(hooked: tuple[int, ...]) -> None:
    model = make(num_hidden_layers=3)
    for index in hooked:
        model.model.layers[index].mlp.act_fn.register_forward_hook(lambda *args: None)
    report = liger_hf.inspect(model, only=["swiglu"])
    rows = {row.pattern: row.verdict for row in report.rows if row.op == "swiglu"}
    one, two = "model.layers.1.mlp", "model.layers.{0,2}.mlp"
    assert rows == ({one: "left", two: "replaceable"} if hooked == (1,) else {two: "left", one: "replaceable"})
    assert "model.layers.*.self_attn" in {row.pattern for row in report.rows}


def test_many_layers_are_named_by_the_first_eight() -> None:
    model = make(num_hidden_layers=10)
    model.model.layers[3].mlp.act_fn.register_forward_hook(lambda *args: None)
    patterns = [row.pattern for row in liger_hf.inspect(model, only=["swiglu"]).rows if row.op == "swiglu"]
    assert patterns == ["model.layers.{0,1,2,4,5,6,7,8,…}.mlp", "model.layers.3.mlp"]


def test_the_title_counts_what_is_left_and_says_where_to_ask_about_the_rest() -> None:
    lines = str(liger_hf.apply(make(), only=["rms_norm"])).splitlines()
    assert lines[0] == "LlamaForCausalLM: 5 × rms_norm replaced, 7 left"
    assert lines[-1].startswith("Modules without a row match no rule. liger_hf.inspect(module, only=[op]) says what")
    with pytest.raises(liger_hf.ModelError, match="float named variance_epsilon, eps, epsilon or norm_eps"):
        liger_hf.inspect(make().lm_head, only=["rms_norm"])


def test_a_module_that_no_rule_matches_has_no_empty_table() -> None:
    title, sentence = str(liger_hf.apply(torch.nn.Linear(4, 4))).splitlines()
    assert title == "Linear: nothing replaced. No module matches a rule."
    assert sentence.startswith("Modules without a row")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_ops_that_the_model_cannot_have_are_not_in_its_report(model_type: str) -> None:
    report = liger_hf.inspect(tiny_config(model_type))
    assert report.absent == {}
    assert "–  " not in str(report)
    assert {row.op for row in report.rows} == report.replaceable.keys()


def test_an_op_that_was_asked_for_and_that_the_model_cannot_have_is_in_its_report() -> None:
    report = liger_hf.apply(make().model, only=["rms_norm", "linear_cross_entropy"])
    assert report.replaced == {"rms_norm": 5}
    assert report.absent == {"linear_cross_entropy": "no module is a model with an output head"}
    assert "no module is a model with an output head" in str(report)


def test_a_forward_that_other_code_replaced_is_left_and_named() -> None:
    model = make()
    model.model.norm.forward = lambda x: x
    reasons = {row.pattern: row.reason for row in liger_hf.apply(model).rows}
    assert reasons["model.norm"] == f"its forward was already replaced on this instance, by code in {__name__}"


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_on_the_head_is_noted(hook: str) -> None:
    model = make()
    getattr(model.lm_head, hook)(lambda *args: None)
    note = "lm_head has a backward hook, so the full logits are computed. Remove the hook to save their memory."
    assert note in liger_hf.inspect(model).notes
    assert note not in liger_hf.inspect(model, exclude=["linear_cross_entropy"]).notes


def test_a_model_that_returns_a_tuple_is_left_and_named() -> None:
    class Returning(type(make())):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
            return super().forward(input_ids, labels=labels, **options).to_tuple()

    model = make()
    model.__class__ = Returning
    reasons = {row.op: row.reason for row in liger_hf.apply(model).rows}
    words = "the model must return an output with `.loss` and `.logits`, it returns tuple"
    assert reasons["linear_cross_entropy"] == words


def test_another_loss_function_is_left_and_named() -> None:
    def own_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return logits.mean()

    model = make()
    model.loss_function = own_loss
    reasons = {row.op: row.reason for row in liger_hf.apply(model).rows}
    words = "its loss function must be ForCausalLMLoss or ForMaskedLMLoss, it is own_loss"
    assert reasons["linear_cross_entropy"] == words


def test_kernels_of_transformers_are_noted() -> None:
    model = make()
    model._use_kernels = True
    assert "use_kernels=True" in liger_hf.apply(model).notes[0]


def test_a_forward_that_was_replaced_on_the_class_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def lce_forward(self: Any, *args: Any, **options: Any) -> Any:
        return original(self, *args, **options)

    model = make()
    assert liger_hf.inspect(model).notes == []
    original = type(model).forward
    lce_forward.__module__ = "liger_kernel.transformers.model.llama"
    monkeypatch.setattr(type(model), "forward", lce_forward)
    words = (
        "LlamaForCausalLM.forward was replaced on the class by liger_kernel.transformers.model.llama; that stays, also "
    )
    assert liger_hf.inspect(model).notes == [f"{words}after undo."]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bert", "bloom", "mamba", "qwen3_moe", "t5", "llava"])
def test_a_unpatched_model_has_no_notes_about_others(model_type: str) -> None:
    assert liger_hf.inspect(tiny_config(model_type), only=[]).notes[:-1] == []


def test_a_deep_model_costs_one_check_for_each_kind_of_module(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = recorded(monkeypatch, application, "decide", lambda found, verify: found.op)
    liger_hf.apply(make(num_hidden_layers=9))
    assert sorted(checked) == ["add_rms_norm", "linear_cross_entropy", "rms_norm", "rope", "swiglu"]


def test_a_version_of_transformers_that_is_not_tested_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "requires", lambda name: ["liger-core==0.1.0", "transformers<5.24,>=5.17"])
    monkeypatch.setattr(metadata, "version", lambda name: "5.24.0" if name == "transformers" else real(name))
    warn_if_untested.cache_clear()
    model = make(num_hidden_layers=1)
    with pytest.warns(UserWarning, match="Liger is tested with transformers<5.24,>=5.17, got 5.24.0") as said:
        liger_hf.inspect(model)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        liger_hf.apply(model)


def test_auto_models_come_with_their_report(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **COMMON)
    model = liger_hf.AutoLigerModelForCausalLM.from_config(config, liger={"exclude": ["rope"]})
    assert model.liger_report.replaced == {"rms_norm": 5, "add_rms_norm": 2, "swiglu": 2, "linear_cross_entropy": 1}
    model.save_pretrained(tmp_path)
    loaded = liger_hf.AutoLigerModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.liger_report.replaced == {**model.liger_report.replaced, "rope": 2}
    ids = tokens()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, model.eval()(ids).logits)
