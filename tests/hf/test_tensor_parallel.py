# SPDX-License-Identifier: Apache-2.0
"""Under the tensor-parallel plan of Transformers a patched model has the losses and gradients of one process, and
gathers no logits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forks import on_ranks
from hf import tensor_ranks
from hf.tiny_models import make
from liger_hf import partial_gradients

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_one_process() -> None:
    on_ranks(2, tensor_ranks.in_turn, (tensor_ranks.steps,))


@pytest.mark.slow
def test_two_ranks_hold_gather_and_give_back_what_they_should() -> None:
    works = (
        tensor_ranks.report_of_a_rank, tensor_ranks.logits_that_are_read, tensor_ranks.log_probabilities,
        tensor_ranks.memory_of_a_step, tensor_ranks.applied_before_the_plan, tensor_ranks.undone,
        tensor_ranks.sequence_parallel, tensor_ranks.shifts_in_a_shard,
    )  # fmt: skip
    on_ranks(2, tensor_ranks.in_turn, works)


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


def saved(folder: Path, *models: Any) -> list[str]:
    folders = [str(folder / str(number)) for number in range(len(models))]
    for model, each in zip(models, folders, strict=True):
        model.save_pretrained(each)
    return folders


@pytest.mark.slow
def test_a_model_loaded_by_tensor_parallel_ranks_is_patched_as_any_other(tmp_path: Path) -> None:
    on_ranks(2, tensor_ranks.loaded, saved(tmp_path, *(make(tie_word_embeddings=tied) for tied in (False, True))))


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    # Experts with biases.
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


@pytest.mark.slow
def test_embeddings_that_are_tied_beside_sharded_experts_are_counted_once(tmp_path: Path) -> None:
    """Transformers #48824: each rank counted the classes of all ranks."""
    models = (make(architecture, tie_word_embeddings=True, **options) for architecture, options in MIXTURES.items())
    on_ranks(2, tensor_ranks.experts_of_ranks, saved(tmp_path, *models))


@pytest.mark.slow
def test_the_vocabulary_may_be_sharded_by_fsdp_as_well() -> None:
    on_ranks(4, tensor_ranks.sharded_twice)
