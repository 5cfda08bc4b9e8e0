# SPDX-License-Identifier: Apache-2.0
"""A model on the meta device gets Liger before its weights: meta, apply, shard, load."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import liger_hf
from hf import tiny_models
from hf.sweep import build
from hf.tiny_models import make, step, tokens
from hf.two_ranks import Expected, batch, inside_peft, on_two_ranks, one_of_ranks, sharded, trained

pytestmark = pytest.mark.cpu


def on_meta(model: Any) -> Any:
    """Return the same model without weights."""
    with torch.device("meta"):
        return type(model)._from_config(copy.deepcopy(model.config))


def materialize(model: Any) -> None:
    model.to_empty(device=tiny_models.DEVICE)
    # Ties, and buffers that no checkpoint has, such as the frequencies of rotary embeddings.
    model.tie_weights()
    model.initialize_weights()


# With every rule for whole models between them: norms of each kind, rotary embeddings, gates, experts, embeddings, heads.
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe", "phi3", "bert", "mamba"])
def test_a_model_has_the_report_and_the_gradients_of_one_that_was_loaded_first(model_type: str) -> None:
    expected = build(model_type).train()
    state, model = expected.state_dict(), on_meta(expected).train()
    report, before = liger_hf.apply(model, mlp_rows=4), liger_hf.apply(expected, mlp_rows=4)
    assert report.replaced
    assert (report.rows, report.notes) == (before.rows, before.notes)
    materialize(model)
    model.load_state_dict(state)
    results, wanted = step(model, **tokens()), step(expected, **tokens())
    torch.testing.assert_close(results, wanted, rtol=0, atol=0)
    report.undo()
    assert model(**tokens()).logits is not None


def test_an_embedding_is_replaced_on_request() -> None:
    model = on_meta(make("llama"))
    assert liger_hf.apply(model, only=["embedding"]).replaced == {"embedding": 1}


def train(rank: int, folder: str) -> None:
    """One of two ranks, in the order of torchtitan; the ranks read their own parts of the files."""
    with one_of_ranks(rank):
        for tied in (False, True):
            whole = make("llama", tie_word_embeddings=tied).train()
            model = on_meta(whole).train()
            liger_hf.apply(model)
            sharded(model)
            materialize(model)
            weights = get_model_state_dict(model)
            if tied:
                del weights["lm_head.weight"]
            dcp.load(weights, storage_reader=HuggingFaceStorageReader(f"{folder}/{tied}"))
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
            model(**batch(rank)).loss.backward()
            Expected.of(whole).compare(f"tied {tied}", model)


@pytest.mark.slow
def test_a_model_that_is_sharded_on_meta_and_then_loaded_has_the_gradients_of_a_whole_one(tmp_path: Path) -> None:
    for tied in (False, True):
        state = make("llama", tie_word_embeddings=tied).state_dict()
        weights = {name: w for name, w in state.items() if not tied or name != "lm_head.weight"}
        (tmp_path / str(tied)).mkdir()
        save_file(weights, tmp_path / str(tied) / "model.safetensors")
    on_two_ranks(train, str(tmp_path))


@pytest.mark.slow
def test_adapters_on_a_model_without_weights_are_replaced() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    plain = trained("adapted_head")
    base = on_meta(inside_peft(plain))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"]))
    model.train()
    report, expected = liger_hf.apply(model), liger_hf.apply(plain)
    assert report.rows == expected.rows
    model.to_empty(device=tiny_models.DEVICE)
    base.initialize_weights()
    model.load_state_dict(plain.state_dict())
    results, wanted = step(model, **tokens()), step(plain, **tokens())
    torch.testing.assert_close(results, wanted, rtol=0, atol=0)
