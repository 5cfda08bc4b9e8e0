# SPDX-License-Identifier: Apache-2.0
"""Code that comes with a model runs if --trust-remote-code says so, and never because standard input does."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
import transformers.dynamic_module_utils
from transformers import LlamaConfig, LlamaForCausalLM

from bench.commands import InProcess, assert_refused
from liger_core.errors import OptionError
from liger_train.plan.comparison import compare_rows
from liger_train.row import row_of
from liger_train.runs.data import _train_tokenizer, read
from liger_train.setup import Setup

SIZES = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "its_own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
REFUSED = "has its own Python code, which needs --trust-remote-code; read it first"
COMMANDS = {
    "train": ("--steps", "1", "--sequence", "16", "--liger", "none", "--data", __file__, "--device", "cpu"),
    "plan": ("--sequence", "16", "--no-techniques"),
}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that is there once the code has run."""
    return tmp_path / "it-ran"


@pytest.fixture
def model(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that is code of its own, as many on the hub are."""
    folder = tmp_path / "own"
    LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "its_own"
    config["auto_map"] = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    _train_tokenizer([CODE], SIZES["vocab_size"]).save_pretrained(folder)
    # Transformers copies the code there.
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_the_code_runs_with_the_option_and_standard_input_does_not_decide(
    liger: InProcess, command: str, model: Path, marker: Path
) -> None:
    words = (command, "--model", str(model), *COMMANDS[command])
    assert_refused(liger, f"--model {model} {REFUSED}", *words)
    assert not marker.exists()
    code, said = liger(*words, "--trust-remote-code")
    assert (code, marker.exists()) == (0, True), said


def test_a_tokenizer_with_code_is_refused_and_not_replaced(model: Path, marker: Path) -> None:
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "code.OwnTokenizer"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(OptionError, match=REFUSED):
        read(Setup(str(model), sequence=16, data=__file__), vocabulary=400, own_tokenizer=True)
    assert not marker.exists()


def test_rows_from_another_source_run_no_code(model: Path, marker: Path) -> None:
    where = dict.fromkeys(("machine", "versions", "commit", "date"), "")
    row = row_of(Setup(str(model), trust_remote_code=True), where, {"peak_bytes": 1}).columns()
    with contextlib.suppress(OptionError):
        next(compare_rows([row]))
    assert not marker.exists()
