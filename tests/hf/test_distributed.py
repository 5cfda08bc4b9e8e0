# SPDX-License-Identifier: Apache-2.0
"""On two processes a patched model has the gradients of one process, and the logits stay lazy."""

import importlib.util
from collections.abc import Callable
from itertools import product

import pytest
import torch

from hf.two_ranks import TRAINED, WAYS, chunks_by_rank, log_probs, on_two_ranks, train, trl_divergence, trl_head, work

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ZERO = ("zero3",) if HAS_DEEPSPEED else ()
# Two ranks need a GPU each.
DEVICES = pytest.mark.parametrize(
    "ranks_on",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))],
    ids=["gloo", "nccl"],
)


@DEVICES
@pytest.mark.parametrize("patch_last", [False, True], ids=["patched_then_wrapped", "wrapped_then_patched"])
def test_gradients_of_two_ranks_are_the_mean_of_single_ones(patch_last: bool, ranks_on: str) -> None:
    # A model inside DDP is the same object as before it; only sharding changes what apply sees. "fsdp2" is trained below.
    ways = tuple(way for way in WAYS if way != "fsdp2" and (way.startswith("fsdp") or not patch_last))
    on_two_ranks(work, ways, patch_last, ranks_on)


@DEVICES
def test_sharded_models_train_to_the_losses_of_the_unpatched_model(ranks_on: str) -> None:
    runs = [("everything", "fsdp2", False), ("everything", "fsdp2", True)]
    if HAS_DEEPSPEED:
        # Stages 0 and 1 leave the weights whole, like 2.
        runs += [("everything", "zero2", False), *(("everything", "zero3", last) for last in (False, True))]
    on_two_ranks(train, runs, ranks_on)


@DEVICES
def test_an_adapted_head_and_one_saved_beside_adapters_are_trained(ranks_on: str) -> None:
    pytest.importorskip("peft", reason="needs peft")
    # The next test patches first where the head is sharded alone or by ZeRO.
    ways = [("fsdp2", False), *((way, True) for way in ("fsdp2", "fsdp2_head_alone", *ZERO))]
    runs = [(kind, *way) for kind, way in product(("adapted_head", "saved_head"), ways)]
    on_two_ranks(train, runs, ranks_on)


@DEVICES
def test_ranks_may_compute_the_loss_in_different_numbers_of_chunks(ranks_on: str) -> None:
    pytest.importorskip("peft", reason="needs peft")
    runs = list(product(TRAINED, ("fsdp2_head_alone", *ZERO)))
    on_two_ranks(chunks_by_rank, runs, ranks_on)


@DEVICES
def test_log_probabilities_of_a_sharded_head_have_the_gradients_of_one_process(ranks_on: str) -> None:
    pytest.importorskip("peft", reason="needs peft")
    # With the root sharded, the weight is whole wherever the forward pass needs it; a head that is sharded alone is
    # whole only in its call.
    runs = [("everything", "fsdp2", path) for path in ("losses", "module", "layer")]
    runs += [("everything", "fsdp2_head_alone", path) for path in ("module", "layer")]
    runs += [(kind, "fsdp2_head_alone", "module") for kind in ("adapted_head", "saved_head")]
    if HAS_DEEPSPEED:
        runs += [("everything", "zero3", "layer"), *((kind, "zero3", "module") for kind in TRAINED)]
    on_two_ranks(log_probs, runs, ranks_on)


@DEVICES
@pytest.mark.parametrize("trainers", [trl_head, trl_divergence], ids=["head", "distillation"])
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental':UserWarning")
def test_trl_runs_on_our_ops_where_fsdp2_shards_the_head(trainers: Callable[..., None], ranks_on: str) -> None:
    pytest.importorskip("trl", reason="needs trl")
    on_two_ranks(trainers, ranks_on)
