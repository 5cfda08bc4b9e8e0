# SPDX-License-Identifier: Apache-2.0
"""`liger inspect` shows what `apply` would do, without weights and without changing anything."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import liger_hf
from hf.sweep import build
from hf.test_isolation import instance_state
from hf.tiny_configs import tiny_config
from hf.tiny_models import COMMON, make, recorded
from liger_core import OptionError
from liger_core.errors import LigerError
from liger_hf.plugin import liger_commands

pytestmark = pytest.mark.cpu

PARTS = {"linear_cross_entropy": 1, "rope": 2, "swiglu": 2, "rms_norm": 5, "add_rms_norm": 2}


def command(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    liger_commands(app)
    return CliRunner().invoke(app, ["inspect", *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"], **COMMON).save_pretrained(tmp_path)
    return str(tmp_path)


# Heads with a projection before them, norms of other kinds, expert units, a bias and a scale.
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["cohere", "qwen3_moe", "gpt2", "modernbert-decoder"])
def test_a_config_gives_the_rows_that_apply_gives(model_type: str) -> None:
    inspected = liger_hf.inspect(tiny_config(model_type))
    applied = liger_hf.apply(build(model_type))
    assert [{**vars(row), "verdict": row.verdict.replace("replaceable", "replaced")} for row in inspected.rows] == [
        vars(row) for row in applied.rows
    ]
    assert inspected.absent == applied.absent
    assert inspected.replaceable == applied.replaced
    assert inspected.replaced == {}


def test_a_name_is_inspected_by_its_config(folder: str) -> None:
    assert liger_hf.inspect(folder).replaceable == PARTS
    assert liger_hf.inspect("mistral", only=["swiglu"]).replaceable == {"swiglu": 32}


def test_inspecting_changes_nothing() -> None:
    model = make()
    before = instance_state(model)
    report = liger_hf.inspect(model)
    assert instance_state(model) == before
    assert report.replaceable == PARTS
    assert report.notes == []
    report.undo()
    assert liger_hf.apply(model).replaced == PARTS


def test_a_model_on_meta_is_inspected_on_the_cpu() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **COMMON))
    report = liger_hf.inspect(model, device="cpu")
    assert report.replaceable == PARTS
    words = "No weights were loaded: small random ones were checked, on cpu, and backends are those for cpu."
    assert report.notes == [words]
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_the_architecture_of_the_config_decides_the_model() -> None:
    config = LlamaConfig(**COMMON, architectures=["LlamaModel"])
    chosen = liger_hf.inspect(config, only=["rms_norm", "linear_cross_entropy"])
    assert chosen.absent["linear_cross_entropy"] == "no module is a model with an output head"


def test_the_command_reads_a_folder(folder: str) -> None:
    result = command(folder, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["model"] == "LlamaForCausalLM"
    assert {(row["op"], row["count"]) for row in report["rows"]} >= {("rope", 2), ("rms_norm", 2)}
    assert {row["verdict"] for row in report["rows"]} == {"replaceable"}


def test_the_command_prints_whole_names_in_100_columns_and_more_if_asked(folder: str) -> None:
    only = ("--only", "rms_norm", "--only", "experts", "--exclude", "rope")
    brief, everything = (command(folder, *only, *more).stdout for more in ((), ("--all-columns",)))
    assert "LlamaForCausalLM: 5 × rms_norm can be replaced" in brief
    row = "│ model.layers.*.post_attention_layernorm │     2 │ rms_norm             │ replaceable: outputs"
    assert row in brief
    assert "│ left: not listed in" in brief
    assert "│ left: no module" in brief
    assert max(len(line) for line in brief.splitlines() if line[:1] in "┏┡│└") <= 100
    assert "LlamaRMSNorm" not in brief
    assert "│ LlamaRMSNorm" in everything
    assert "│ reference" in everything


def test_the_dtype_decides_what_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = recorded(monkeypatch, liger_hf.application, "decide", lambda found, verify: found.dtype)
    liger_hf.inspect(tiny_config("llama"), only=["rms_norm"], dtype="bfloat16")
    assert checked == [torch.bfloat16]


MISTAKES: dict[str, tuple[tuple[str, ...], type[LigerError], str]] = {
    "no_network": (("notamodel",), liger_hf.ModelError, r"liger inspect: the model must be tiny, .*, a folder with a config\.json, a model type of Transformers or a name on the hub, got 'notamodel': no such folder, and the hub cannot be reached\.$"),
    "empty_folder": (("{folder}/..",), liger_hf.ModelError, r"liger inspect: the model must be .*, a folder with a config\.json, .*: ValueError: "),
    "dtype": (("llama", "--dtype", "bfloat17"), OptionError, r"dtype must be one of float32, bfloat16, float16, got 'bfloat17'"),
    "device": (("llama", "--device", "nowhere"), OptionError, r"device must be one that is here, got 'nowhere'"),
    "op": (("llama", "--only", "rms_nrom"), OptionError, r"liger_hf\.inspect: only must name ops among .* Did you mean 'rms_norm'\?"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_raises_a_clear_error(
    arguments: tuple[str, ...], error: type[LigerError], message: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liger_hf.hub.hub_is_reachable", lambda: False)
    result = command(*(argument.format(folder=folder) for argument in arguments))
    assert isinstance(result.exception, error)
    with pytest.raises(error, match=message):
        raise result.exception
