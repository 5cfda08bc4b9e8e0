# SPDX-License-Identifier: Apache-2.0
"""Under the tensor-parallel plan of Transformers a patched model has the losses and gradients of one process, and
gathers no logits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forks import on_ranks
from hf import tensor_ranks
from hf.tensor_ranks import SETUPS
from hf.tiny_models import make
from liger_hf import partial_gradients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]


def test_losses_and_gradients_are_those_of_one_process() -> None:
    on_ranks(2, tensor_ranks.steps, list(SETUPS))


def test_the_report_says_what_a_rank_holds() -> None:
    on_ranks(2, tensor_ranks.report_of_a_rank)


def test_logits_are_gathered_when_they_are_read() -> None:
    on_ranks(2, tensor_ranks.logits_that_are_read)


def test_log_probabilities_of_a_head_are_those_of_one_process() -> None:
    on_ranks(2, tensor_ranks.log_probabilities)


def test_no_rank_holds_the_logits_of_all_classes() -> None:
    on_ranks(2, tensor_ranks.memory_of_a_step)


def test_a_model_patched_before_its_plan_is_right_and_says_what_it_costs() -> None:
    on_ranks(2, tensor_ranks.applied_before_the_plan)


def test_undo_gives_the_head_and_the_norms_of_heads_back_to_their_plan() -> None:
    on_ranks(2, tensor_ranks.undone)


@pytest.mark.parametrize("mended", [False, True])
def test_gradients_that_a_plan_adds_up_in_another_way_are_left_alone(mended: bool) -> None:
    mesh = SimpleNamespace(size=lambda: 2, get_group=lambda: None)

    def adds_up(module: nn.Module, *_: Any) -> None:
        for weight in module.parameters(recurse=False):
            dist.all_reduce(weight.grad, group=mesh.get_group())

    def adds_up_the_last(module: nn.Module, *_: Any) -> None:
        for weight in module.parameters(recurse=False):
            dist.all_reduce(weight.grad.sub_(weight.before), group=mesh.get_group())

    module, hook = nn.LayerNorm(4), adds_up_the_last if mended else adds_up
    hook.__module__, hook.__qualname__ = (
        "transformers.tensor_parallel",
        "ReplicatedWithGradAllReduce.install_forward.<locals>.hook",
    )
    module.register_full_backward_hook(hook)
    assert len(list(partial_gradients.patches(module))) == (0 if mended else 1)


@pytest.mark.parametrize("tied", [False, True], ids=["own_weight", "tied_to_the_embeddings"])
def test_a_model_loaded_by_tensor_parallel_ranks_is_patched_as_any_other(tied: bool, tmp_path: Path) -> None:
    make(tie_word_embeddings=tied).save_pretrained(tmp_path)
    on_ranks(2, tensor_ranks.loaded, str(tmp_path))


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    # Experts with biases.
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


@pytest.mark.parametrize("architecture", MIXTURES)
def test_embeddings_that_are_tied_beside_sharded_experts_are_counted_once(architecture: str, tmp_path: Path) -> None:
    """Transformers #48824: each rank counted the classes of all ranks."""
    make(architecture, tie_word_embeddings=True, **MIXTURES[architecture]).save_pretrained(tmp_path)
    on_ranks(2, tensor_ranks.experts_of_ranks, str(tmp_path))


def test_the_vocabulary_may_be_sharded_by_fsdp_as_well() -> None:
    on_ranks(4, tensor_ranks.sharded_twice)


def test_norms_run_on_shards_of_the_sequence_under_the_plan_of_torch() -> None:
    on_ranks(2, tensor_ranks.sequence_parallel)


def test_labels_are_not_shifted_inside_a_shard_of_the_sequence() -> None:
    """verl #6068: the last token of each shard would lose its label."""
    on_ranks(2, tensor_ranks.shifts_in_a_shard)
