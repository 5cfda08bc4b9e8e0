# SPDX-License-Identifier: Apache-2.0
"""Documents packed into one row by position_ids: the report of `apply` says in which models each of them sees those
before it."""

import pytest
import torch
from torch import nn

import liger_hf
from hf.sweep import build
from hf.tiny_models import tokens
from liger_hf import recurrent

pytestmark = pytest.mark.cpu
# Model type → the layers that the note names.
RECURRENT = {
    "bamba": "BambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2_moe": "Lfm2MoeShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "minimax": "MiniMaxLightningAttention",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "rwkv": "RwkvSelfAttention, RwkvFeedForward",
    "xlstm": "xLSTMLayer",
}
ATTENTION = ("deepseek_v3", "gemma2", "llama", "mixtral")


@pytest.mark.parametrize("model_type", [*RECURRENT, *ATTENTION])
def test_a_model_whose_packed_documents_see_each_other_has_a_note(model_type: str) -> None:
    model = build(model_type).eval()
    ids = tokens(batch=1, length=14)["input_ids"]
    positions = torch.cat([torch.arange(6), torch.arange(8)])[None]
    with torch.no_grad():
        alone = model(input_ids=ids[:, 6:], use_cache=False).logits
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 6:]
    sees_others = float((packed - alone).abs().max() / alone.abs().max()) > 1e-3
    note = recurrent.note(model)
    assert sees_others == (note is not None) == (model_type in RECURRENT)
    assert note is None or f"({RECURRENT[model_type]})" in note


def test_apply_says_so_once_and_counts_the_layers() -> None:
    model = build("qwen3_5_text")
    for _ in range(2):
        notes = liger_hf.apply(model, only=["rms_norm"], verify=False).notes
        found = [note.partition(",")[0] for note in notes if "position_ids" in note]
        assert found == ["In 1 module (Qwen3_5GatedDeltaNet)"]
    assert str(recurrent.note(nn.ModuleList([model, build("qwen3_5_text")]))).startswith("In 2 modules (")
