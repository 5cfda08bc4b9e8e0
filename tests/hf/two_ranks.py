# SPDX-License-Identifier: Apache-2.0
"""Training steps on two processes, compared with the mean of the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import liger_hf
from hf.tiny_models import make, step, tokens, twin
from liger_core import use


def batch(rank: int) -> dict[str, Tensor]:
    ids = (tokens()["input_ids"] + 7 * rank) % 290 + 3
    return {"input_ids": ids, "labels": ids}


def sharded(model: Any, head: dict[str, Any] | None = None, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head is not None:
        fully_shard(model.lm_head, mesh=mesh, **head)
    return fully_shard(model, mesh=mesh, **options)


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "ddp_unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "ddp_static": lambda model: DistributedDataParallel(model, static_graph=True),
    "fsdp2": sharded,
    "fsdp2_root_resharded": lambda model: sharded(model, reshard_after_forward=True),
    "fsdp2_head_alone": lambda model: sharded(model, head={}),
    "fsdp2_head_kept": lambda model: sharded(model, head={"reshard_after_forward": False}),
}


def work(rank: int, store: str, ways: tuple[str, ...], patch_last: bool) -> None:
    """One process; raises if a gradient is wrong or if all the logits were made."""
    torch.set_num_threads(1)
    # A rank that waits for one that failed gives up, instead of half an hour later.
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(minutes=2))
    base = make("llama", tie_word_embeddings=False).train()
    single = [step(twin(base), **batch(r)) for r in range(2)]
    liger_hf.LazyLogits.materialize = _refuse  # type: ignore[method-assign]
    with use("reference"):
        for way in ways:
            _compare(way, base, {name: (single[0][name] + single[1][name]) / 2 for name in single[0]}, rank, patch_last)
    dist.destroy_process_group()


def _compare(way: str, base: Any, expected: dict[str, Tensor], rank: int, patch_last: bool) -> None:
    model = twin(base)
    if not patch_last:
        liger_hf.apply(model)
    wrapped = WAYS[way](model)
    if patch_last:
        liger_hf.apply(model)
    wrapped(**batch(rank)).loss.backward()
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        largest = float((whole - expected[name]).abs().max() / expected[name].abs().max())
        if largest > 1e-5:
            raise AssertionError(f"{way}: the gradient of {name} is off by {largest:.3g} of its largest element")


def _refuse(self: Any) -> Tensor:
    raise AssertionError("all the logits of a training step were made")
