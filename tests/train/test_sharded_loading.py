# SPDX-License-Identifier: Apache-2.0
"""Every rank loads its own shards of a model alone, and never holds the whole model."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from hf.two_ranks import on_two_ranks
from liger_bench.memory import peak_bytes
from liger_train.model import Built, build
from liger_train.sharded_loading import SHARD
from train.training import FIELDS, setup_of

pytestmark = [pytest.mark.slow, pytest.mark.cpu]
CPU = torch.device("cpu")
# Transformers stores the experts of a layer apart, and stacks them when it loads them.
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    # 127 rows on two ranks.
    "llama": {"vocab_size": 127},
    "qwen3_moe": EXPERTS | {"tie_word_embeddings": False},
}
# Large enough that a layer is a small part of it: 12 MB.
DEEP = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 12, "tie_word_embeddings": False}


def save(folder: Path, model_type: str, **fields: Any) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(FIELDS | fields))).save_pretrained(folder)


def check_shards(built: Built, whole: nn.Module, rank: int) -> None:
    """Raises unless every weight of a model is on meta, with the shard of this rank."""
    expected = dict(whole.named_parameters())
    for name, weight in built.model.named_parameters():
        if "lora_" in name:
            assert not weight.is_meta
            continue
        plain = expected.pop(name.removeprefix("base_model.model.").replace(".base_layer", ""))
        rows: tuple[Tensor, ...] = plain.detach().chunk(2)
        assert weight.is_meta
        assert weight.shape == plain.shape
        assert torch.equal(getattr(weight, SHARD), rows[rank] if rank < len(rows) else plain[:0]), name
    assert not expected
    assert not any(buffer.is_meta for buffer in built.model.buffers())


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    torch.distributed.init_process_group("gloo")
    for name in MODELS:
        setup = setup_of(Path(folder) / name, ranks=2, shard="fsdp2", liger="all")
        whole = AutoModelForCausalLM.from_pretrained(setup.model)
        check_shards(build(setup, CPU), whole, rank)
        adapted = build(replace(setup, adapter="lora"), CPU)
        check_shards(adapted, whole, rank)
        # As in every run, but for the ranks.
        random = replace(setup, random_weights=True)
        torch.manual_seed(random.seed)
        expected = type(whole).from_pretrained(None, config=AutoConfig.from_pretrained(setup.model), state_dict={})
        check_shards(build(random, CPU), expected, rank)
        if name == "llama":
            # An even number of rows; the plan of tensor parallelism shards columns, too.
            sharded = build(replace(random, model=str(Path(folder) / "deep"), shard="none", tp=2), CPU).model
            torch.manual_seed(random.seed)
            config = AutoConfig.from_pretrained(Path(folder) / "deep")
            weights = type(whole).from_pretrained(None, config=config, state_dict={}).state_dict()
            for key, weight in sharded.state_dict().items():
                assert torch.equal(weight.full_tensor() if isinstance(weight, DTensor) else weight, weights[key]), key
    files = sum(path.stat().st_size for path in (Path(folder) / "deep").glob("*.safetensors"))
    # Files are mapped, so their pages belong to the page cache of the machine.
    random_weights = {"random_weights": True}
    for options, mapped in (({}, files), (random_weights, 0), ({"shard": "none", "tp": 2} | random_weights, 0)):
        deep = setup_of(Path(folder) / "deep", **{"ranks": 2, "shard": "fsdp2", "liger": "none"} | options)
        built: list[Any] = []
        held = peak_bytes(lambda deep=deep, built=built: built.append(build(deep, CPU)), CPU) - mapped
        whole_bytes, layer = (
            sum(weight.numel() * weight.itemsize for weight in part.parameters())
            for part in (built[0].model, built[0].model.model.layers[0])
        )
        assert held < whole_bytes / 2 + layer, (options, held, whole_bytes, layer)
    torch.distributed.destroy_process_group()


def test_each_rank_holds_its_shards_and_one_layer_at_most(tmp_path: Path) -> None:
    for name, fields in MODELS.items():
        save(tmp_path / name, name, **fields)
    save(tmp_path / "deep", "llama", **DEEP)
    on_two_ranks(work, str(tmp_path))
