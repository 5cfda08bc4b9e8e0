# SPDX-License-Identifier: Apache-2.0
"""Inspection says which implementations a model runs where Transformers has several, and what is missing for faster
ones."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from hf.sweep import build
from liger_hf import inspect
from liger_hf.implementations import sentences

pytestmark = pytest.mark.cpu
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}


def llama(attention: str) -> nn.Module:
    config = LlamaConfig(**SMALL, intermediate_size=32, num_attention_heads=2)
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def test_eager_attention_comes_with_advice() -> None:
    (sentence,) = sentences(llama("eager"))
    assert "attn_implementation='sdpa'" in sentence


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(None, ["pip install causal-conv1d (CUDA only).", "pip install mamba-ssm (CUDA only)."]), (object(), [])],
    ids=["missing", "installed"],
)
def test_a_kernel_is_named_once_where_its_package_is_missing(
    spec: Any, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liger_hf.implementations.find_spec", lambda package: spec)
    with torch.device("meta"):
        found = sentences(MambaForCausalLM(MambaConfig(**SMALL)))
    assert [sentence.rpartition("; ")[2] for sentence in found] == expected


@pytest.mark.parametrize(
    ("name", "words"), [("eager", "experts_implementation='grouped_mm'"), ("grouped_mm", "run by grouped_mm")]
)
def test_experts_are_named_where_there_are_some(name: str, words: str) -> None:
    model = build("mixtral")
    model.set_experts_implementation(name)
    assert sum(words in sentence for sentence in sentences(model)) == 1


def test_the_report_of_an_inspection_has_the_notes() -> None:
    assert inspect(llama("sdpa")).implementations == ["Attention runs by sdpa."]
