# SPDX-License-Identifier: Apache-2.0
"""Packed documents that are apart pass, and a leak between them is named with its layer."""

import json
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from liger_core.errors import OptionError
from liger_verify import compare_packing
from liger_verify.command import verify
from liger_verify.forms import Packing
from liger_verify.packing import flattened
from verify.hybrid import Backward, GatedDeltaNet, Hybrid, ShortConv

pytestmark = pytest.mark.cpu
VARLEN = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
# Model type → the form of packing that it supports without kernels of other packages.
RIGHT = {
    "llama": "position_ids", "gemma3_text": "position_ids", "qwen3_moe": "cu_seq_lens", "gpt_oss": "mask",
    "qwen3_next": "rows", "mamba2": "rows", "lfm2": "rows", "zamba": "rows", "zamba2": "rows",
}  # fmt: skip
# Model type → the sentence on documents that only position_ids separate. Transformers from 5.24 refuses the boundaries of
# cu_seq_lens without the kernels that read them.
LEAKS = {
    "qwen3_next": "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet) carries state over a document boundary, to document 1",
    "mamba2": "backbone.layers.0.mixer (Mamba2Mixer) carries state over a document boundary, to document 1",
    "zamba": "model.layers.0.mamba (ZambaMambaMixer) carries state over a document boundary, to document 1",
    "zamba2": "model.layers.0.mamba (Zamba2MambaMixer) carries state over a document boundary, to document 1",
    "lfm2": "model.layers.0.conv (Lfm2ShortConv) convolves over a document boundary: other documents change the first 2 tokens of document 1",
    "gpt_oss": "model.layers.0.self_attn (GptOssAttention) attends over a document boundary, to document 1",
}  # fmt: skip


def hybrid(*layers: tuple[str, nn.Module]) -> Hybrid:
    return Hybrid(*layers or (("linear_attn", GatedDeltaNet()), ("conv", ShortConv())))


def llama() -> Any:
    return Packing("llama", liger=False).build()


@pytest.mark.slow
@pytest.mark.parametrize("model", RIGHT)
def test_documents_that_are_apart_pass(model: str) -> None:
    packing = Packing(model, model in ("llama", "qwen3_moe"), RIGHT[model])
    report = packing.report(packing.build())
    assert report.right, str(report)
    assert str(report).startswith("right: 3 documents have the losses")
    assert report.largest_error < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("model", LEAKS)
def test_a_leak_of_a_type_of_transformers_is_named(model: str) -> None:
    packing = Packing(model, False, "position_ids")
    report = packing.report(packing.build())
    assert not report.right
    assert report.sentences()[0] == LEAKS[model]


def test_recurrent_layers_that_read_the_boundaries_pass() -> None:
    report = compare_packing(hybrid(), flattened(**VARLEN))
    assert report.right, str(report)
    assert list(report.layers) == ["layers.0", "layers.1"]


MIXERS = {
    "state": (("linear_attn", GatedDeltaNet(resets=False)), "layers.1.linear_attn (GatedDeltaNet) carries state over a document boundary, to document 1"),
    "convolution": (("conv", ShortConv(resets=False)), "layers.1.conv (ShortConv) convolves over a document boundary: other documents change the first 2 tokens of document 1"),
}  # fmt: skip


@pytest.mark.parametrize(("mixer", "sentence"), MIXERS.values(), ids=MIXERS)
def test_a_planted_leak_is_named_in_the_layer_where_it_is(mixer: tuple[str, nn.Module], sentence: str) -> None:
    report = compare_packing(hybrid(("linear_attn", GatedDeltaNet()), mixer), flattened(**VARLEN))
    assert report.sentences()[0] == sentence
    assert report.layers["layers.0"] < 1e-9 < report.layers["layers.1"]
    assert report.wrong_losses == [1, 2]


def sharded(name: str, documents: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pack documents with the offsets of two context-parallel shards, each of which counts from 0."""
    batch = dict(flattened(**VARLEN)(documents))
    half = batch["input_ids"].shape[1] // 2
    if name == "position_ids":
        batch[name][0, half:] -= batch[name][0, half].clone()
    else:
        batch[name] = torch.tensor(sorted({each % half for each in batch[name].tolist()} | {2 * half}))
    return batch


SHARDS = {
    "position_ids": (llama, "model.layers.0.self_attn (LlamaAttention) computes document 1 differently from its token 7 on, and no other document changes it", "position_ids begins a document at token 7 of document 1"),
    "cu_seq_lens_q": (hybrid, "layers.0.linear_attn (GatedDeltaNet) computes document 0 differently from its token 9 on, and no other document changes it", "cu_seq_lens_q begins a document at token 9 of document 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDS)
def test_offsets_of_a_shard_of_the_sequence_are_named(name: str) -> None:
    make, sentence, cause = SHARDS[name]
    report = compare_packing(make(), lambda documents: sharded(name, documents))
    assert report.sentences()[0].startswith(sentence)
    assert any(each.startswith(cause) for each in report.sentences())


def test_a_label_that_another_document_predicts_is_named() -> None:
    def collate(documents: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = flattened()(documents)
        return {**batch, "labels": batch["input_ids"]}

    (cause, *losses) = compare_packing(llama(), collate).sentences()
    assert cause.startswith(
        "labels must be -100 at the first token of document 1, which the last token of another document predicts"
    )
    assert len(losses) == 2


def test_a_leak_of_the_backward_pass_alone_is_named() -> None:
    report = compare_packing(hybrid(("conv", ShortConv()), ("wrong", Backward())), flattened(**VARLEN))
    assert not report.right
    assert not report.wrong_losses
    assert max(report.layers.values()) < 1e-9
    assert "gradients first diverge at layers.0.mlp.0." in str(report)


def test_documents_and_labels_of_a_user_are_compared() -> None:
    documents = [
        {"input_ids": torch.arange(5, 12), "labels": [-100, -100, -100, 8, 9, 10, 11]},
        {"input_ids": [30, 31, 30, 33]},
    ]
    report = compare_packing(llama(), documents=documents)
    assert report.right
    assert len(report.alone) == 2


def test_a_model_has_the_same_weights_in_every_comparison() -> None:
    plain, patched = (Packing("llama", liger).build().state_dict() for liger in (False, True))
    torch.testing.assert_close(patched, plain, rtol=0, atol=0)


def test_the_model_is_left_as_it_is() -> None:
    model = llama()
    model.config.use_cache = True
    compare_packing(model)
    assert model.config.use_cache
    assert model.lm_head.weight.dtype == torch.float32
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_document_that_a_collator_cuts_is_refused() -> None:
    def collate(documents: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {name: values[:, 3:] for name, values in flattened()(documents).items()}

    with pytest.raises(OptionError, match="every document whole in one row, document 0 of 13 tokens is not in"):
        compare_packing(hybrid(), collate)


def test_a_random_loss_is_refused() -> None:
    model = hybrid(("conv", ShortConv()), ("drop", Drop()))
    with pytest.raises(OptionError, match=r"finite and not random, two runs gave .* turn dropout off"):
        compare_packing(model)
    assert compare_packing(model.eval(), flattened(**VARLEN)).right


class Drop(nn.Dropout):
    def forward(self, x: Tensor, starts: set[int]) -> Tensor:
        return super().forward(x)


def test_a_model_without_a_loss_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(llama().config).model
    with pytest.raises(OptionError, match="must compute a loss from input_ids and labels, it raised "):
        compare_packing(model)


def test_the_command_prints_json_and_ends_with_1_where_documents_leak(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        verify(packing=True, model=["gpt_oss"], liger=False, as_json=True)
    assert ended.value.exit_code == 1
    printed = json.loads(capfd.readouterr().out)
    results = {each["form"]: each["result"] for each in printed["comparisons"]}
    assert results == {"position_ids": "wrong", "cu_seq_lens": "wrong", "mask": "right", "rows": "right"}
    assert "attends over a document boundary" in printed["comparisons"][0]["sentences"][0]
