# SPDX-License-Identifier: Apache-2.0
"""The training steps that are measured: model, batch, and what is trained how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from liger_hf.presets import PRESETS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HF, LIGER_KERNEL, LIGER = "hf", "liger-kernel", "liger"
# Fields of a config as small as those of the preset `tiny`.
SMALL: dict[str, Any] = PRESETS["tiny"][1] | {"head_dim": 16, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    words       what it is, for the page
    model       a preset, or a model type of Transformers with its `fields`
    small       what `fields` are at --tiny
    adapters    LoRA of rank 16 in float32 on every linear layer; the rest is frozen
    recompute   every layer is checkpointed
    compile     a mode of torch.compile for the whole model
    optimizer   a step includes the update by AdamW
    """

    name: str
    words: str
    model: str
    batch: int
    sequence: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    adapters: bool = False
    recompute: bool = True
    compile: str | None = None
    optimizer: bool = False
    implementations: tuple[str, ...] = (HF, LIGER_KERNEL, LIGER)

    def shape(self, tiny: bool) -> tuple[int, int]:
        return (2, 32) if tiny else (self.batch, self.sequence)

    def config(self, tiny: bool) -> PretrainedConfig:
        from transformers import AutoConfig

        kind, fields = PRESETS.get(self.model, (self.model, self.fields))
        if tiny:
            fields = SMALL | dict(self.small)
        return AutoConfig.for_model(
            kind,
            max_position_embeddings=max(self.sequence, 2048),
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
            **fields,
        )


QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
CASES = {
    case.name: case
    for case in (
        Case(
            "lora",
            "Llama 8B, LoRA of rank 16 on all linear layers, adapters in float32",
            "llama-3-8b",
            16,
            2048,
            adapters=True,
        ),
        Case(
            "experts",
            "Qwen3-30B-A3B, 6 of 48 layers, 8 of 128 experts per token",
            "qwen3_moe",
            8,
            4096,
            fields=QWEN3
            | {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_hidden_layers": 6,
                "num_key_value_heads": 4,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
            small={"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
            recompute=False,
            # The fused experts of liger-kernel 0.8.5 had not finished autotuning after 120 s.
            implementations=(HF, LIGER),
        ),
        Case(
            "graphs",
            "Llama 1B, CUDA graphs",
            "llama-3.2-1b",
            1,
            1024,
            compile="reduce-overhead",
            implementations=(HF, LIGER),
        ),
        Case(
            "compiled",
            "Llama 1B, compiled",
            "llama-3.2-1b",
            8,
            1024,
            recompute=False,
            compile="default",
            implementations=(HF, LIGER),
        ),
        Case("update", "Llama 8B, with the update by AdamW", "llama-3-8b", 64, 512, optimizer=True),
        Case("long", "Llama 8B, one long sequence", "llama-3-8b", 1, 32_768),
        Case(
            "qk_norm",
            "Qwen3 8B, 4 of 36 layers",
            "qwen3",
            4,
            4096,
            fields=QWEN3
            | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 4, "num_key_value_heads": 8},
            recompute=False,
        ),
    )
}
