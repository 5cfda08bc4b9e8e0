# SPDX-License-Identifier: Apache-2.0
"""The report shows what was replaced, what was not, and why; models that no rule knows keep working."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import rich.console
import torch
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import liger_hf
from hf.tiny_configs import tiny_config
from hf.tiny_models import COMMON, OPTIONS, disagreements, exact_step, make, step, tokens, twin
from liger_core import rms_norm, swiglu
from liger_hf import application
from liger_hf.verification import decide

pytestmark = pytest.mark.cpu


def test_a_row_has_pattern_count_class_op_backend_and_reason() -> None:
    rows = {row.pattern: row for row in liger_hf.apply(make("gemma2")).rows}
    row = rows["model.layers.*.pre_feedforward_layernorm"]
    assert (row.count, row.module, row.op, row.backend, row.verdict) == (
        2,
        "Gemma2RMSNorm",
        "rms_norm",
        "reference",
        "replaced",
    )
    assert row.reason == "outputs and gradients agree, weight_offset=1, cast='float32'"
    assert rows["model.layers.*.mlp"].reason == "outputs and gradients agree, approximate='tanh'"
    assert rows["(the model itself)"].op == "linear_cross_entropy"


def test_the_report_is_plain_data_text_and_a_table() -> None:
    report = liger_hf.apply(make())
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["model"] == "LlamaForCausalLM"
    assert {row["pattern"] for row in data["rows"]} == {row.pattern for row in report.rows}
    console = rich.console.Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    table = console.export_text()
    for text in (str(report), table):
        assert "model.layers.*.input_layernorm" in text
        assert (
            "LlamaForCausalLM: 1 × linear_cross_entropy, 2 × add_rms_norm, 2 × rope, 2 × swiglu, 5 × rms_norm replaced"
            in text
        )


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
    assert {row.op: row.reason for row in report.rows if row.verdict == "left"} == {
        "add_rms_norm": "not asked for",
        "rope": "not asked for",
        "linear_cross_entropy": "not asked for",
    }


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
    console = rich.console.Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    for text in (str(report), console.export_text()):
        assert "no module is a model with an output head" in text


def causal(architecture: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, vocab_size=300, hidden_size=64, **options)
    )


UNKNOWN: dict[str, tuple[Any, dict[str, int]]] = {
    "gpt2": (
        lambda: causal("gpt2", n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
        {"layer_norm": 5, "linear_cross_entropy": 1},
    ),
    "mamba": (
        lambda: causal("mamba", num_hidden_layers=2, state_size=8),
        {"rms_norm": 3, "linear_cross_entropy": 1},
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_model_trains_as_before(name: str) -> None:
    build, replaced = UNKNOWN[name]
    plain = build().train()
    patched = twin(plain)
    report = liger_hf.apply(patched)
    assert report.replaced == replaced
    inputs = tokens()
    assert disagreements(step(patched, **inputs), step(plain, **inputs), exact_step(plain, **inputs)) == {}


def test_an_encoder_decoder_that_computes_its_own_loss_makes_no_logits() -> None:
    config = T5Config(
        vocab_size=300,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    config.dropout_rate = 0.0
    plain = T5ForConditionalGeneration(config).train()
    patched = twin(plain)
    report = liger_hf.apply(patched)
    assert report.replaced["linear_cross_entropy"] == 1
    inputs = tokens()
    assert disagreements(step(patched, **inputs), step(plain, **inputs), exact_step(plain, **inputs)) == {}
    assert isinstance(patched(**inputs).logits, liger_hf.LazyLogits)


def test_interleaved_rotary_and_norms_that_center_are_found_in_cohere() -> None:
    options = {
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    plain = causal("cohere", **options).train()
    patched = twin(plain)
    report = liger_hf.apply(patched)
    assert report.replaced == {"linear_cross_entropy": 1, "rope": 2, "swiglu": 2, "layer_norm": 3}
    inputs = tokens()
    assert disagreements(step(patched, **inputs), step(plain, **inputs), exact_step(plain, **inputs)) == {}


def test_a_forward_that_other_code_replaced_is_left_and_named() -> None:
    model = make()
    model.model.norm.forward = lambda x: x
    reasons = {row.pattern: row.reason for row in liger_hf.apply(model).rows}
    assert reasons["model.norm"] == f"its forward was already replaced on this instance by {__name__}"


def test_another_loss_function_is_left_and_named() -> None:
    def own_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return logits.mean()

    model = make()
    model.loss_function = own_loss
    reasons = {row.op: row.reason for row in liger_hf.apply(model).rows}
    assert (
        reasons["linear_cross_entropy"]
        == "its loss function must be ForCausalLMLoss or ForMaskedLMLoss, it is own_loss"
    )


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
    notes = liger_hf.inspect(model).notes
    assert notes == [
        "LlamaForCausalLM.forward was replaced on the class by liger_kernel.transformers.model.llama; that stays, also "
        "after undo."
    ]


@pytest.mark.parametrize("model_type", [*OPTIONS, "bert", "bloom", "mamba", "qwen3_moe", "t5", "llava"])
def test_a_unpatched_model_has_no_notes_about_others(model_type: str) -> None:
    assert liger_hf.inspect(tiny_config(model_type), only=[]).notes[:-1] == []


def test_a_deep_model_costs_one_check_for_each_kind_of_module(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(application, "decide", lambda found, verify: checked.append(found.op) or decide(found, verify))
    liger_hf.apply(make(num_hidden_layers=9))
    assert sorted(checked) == ["add_rms_norm", "linear_cross_entropy", "rms_norm", "rope", "swiglu"]


def test_a_model_of_eight_billion_weights_is_patched_in_two_seconds() -> None:
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    # No weights: they could not be copied.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=32, **sizes))
    began = time.process_time()
    report = liger_hf.apply(model, verify=False)
    assert time.process_time() - began < 2
    assert report.replaced == {"linear_cross_entropy": 1, "rope": 32, "swiglu": 32, "rms_norm": 65, "add_rms_norm": 32}


def test_auto_models_come_with_their_report(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **{**COMMON, **OPTIONS["llama"]})
    model = liger_hf.AutoLigerModelForCausalLM.from_config(config, liger={"exclude": ["rope"]})
    assert model.liger_report.replaced == {"rms_norm": 5, "add_rms_norm": 2, "swiglu": 2, "linear_cross_entropy": 1}
    model.save_pretrained(tmp_path)
    loaded = liger_hf.AutoLigerModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.liger_report.replaced == {
        "rms_norm": 5,
        "add_rms_norm": 2,
        "rope": 2,
        "swiglu": 2,
        "linear_cross_entropy": 1,
    }
    ids = tokens()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, model.eval()(ids).logits)
