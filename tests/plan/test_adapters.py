# SPDX-License-Identifier: Apache-2.0
"""Adapters are planned without peft to the byte as with it."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from liger_train.plan import adapters, step
from liger_train.plan.advice import _alternative
from liger_train.plan.step import Prediction, predict
from liger_train.setup import Setup
from liger_train.techniques import TECHNIQUES

pytestmark = pytest.mark.slow

SETUPS: dict[str, dict[str, Any]] = {
    "plain": {"liger": "none", "checkpoint": "none"},
    "checkpointing": {"precision": "bf16"},
    "bfloat16": {"precision": "bf16-pure", "checkpoint": "1"},
    "4 bits": {"adapter": "qlora", "precision": "bf16"},
    "ZeRO-3": {"shard": "zero3", "ranks": 2},
    "FSDP2": {"shard": "fsdp2", "ranks": 2, "precision": "bf16"},
}
# Linear layers, packed ones, and the transposed ones of GPT-2.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "phi3": {"pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
COMMON = {
    "vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    step._step.cache_clear()
    yield
    step._step.cache_clear()


def save(kind: str, fields: dict[str, Any], folder: Path) -> None:
    fields = {**COMMON, "bos_token_id": None, "eos_token_id": None, **fields}
    AutoConfig.for_model(kind, **fields).save_pretrained(folder)


def check_without_peft(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Prediction:
    """The prediction with peft, which must be the one without it."""
    pytest.importorskip("peft")
    with_peft = predict(setup)
    step._step.cache_clear()
    without_peft(monkeypatch)
    assert predict(setup) == with_peft
    return with_peft


def without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    for name in ("peft", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("changes", SETUPS.values(), ids=SETUPS)
def test_a_plan_is_that_of_a_model_that_peft_has_adapted(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch": 2, "sequence": 64, "adapter": "lora", "device": "cuda", "checkpoint": "full"}
    check_without_peft(Setup("tiny", **(options | changes)), monkeypatch)


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_layers_get_adapters(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(kind, MODELS[kind], tmp_path)
    setup = Setup(str(tmp_path), batch=2, sequence=64, adapter="lora", device="cuda", checkpoint="none")
    check_without_peft(setup, monkeypatch)


def test_only_an_alternative_for_experts_needs_peft_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_peft(monkeypatch)
    for device in ("cuda", "cpu"):
        options = {"batch": 2, "sequence": 64, "precision": "fp32", "checkpoint": "none"}
        adapted = Setup("tiny", adapter="lora", device=device, **options)
        assert _alternative(TECHNIQUES["adapter"]["lora"], adapted, predict).prediction is not None
    save("qwen3_moe", EXPERTS, tmp_path)
    setup = Setup(str(tmp_path), batch=2, sequence=64, adapter="lora", device="cuda")
    found = _alternative(TECHNIQUES["adapter"]["lora"], setup, predict)
    assert found.prediction is None
    assert found.problem == "--adapter lora needs peft for a model with experts; pip install peft"


def test_a_plan_has_the_rank_and_the_targets_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"batch": 2, "sequence": 64, "device": "cuda", "checkpoint": "none", "precision": "bf16"}
    setup = Setup("tiny", adapter="qlora", adapter_rank=64, adapter_alpha=8, adapter_targets="q_proj,v_proj", **options)
    with_peft = check_without_peft(setup, monkeypatch)
    # Frozen layers without an adapter are in 4 bits, too.
    everywhere = predict(Setup("tiny", adapter="qlora", adapter_rank=64, **options))
    assert with_peft.static_bytes < everywhere.static_bytes
