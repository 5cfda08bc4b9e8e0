# SPDX-License-Identifier: Apache-2.0
"""Training on two processes, compared with the mean of the gradients of one process, and with what one process trains to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import liger_hf
from hf import tiny_models
from hf.tiny_models import make, step, tokens, twin
from liger_core import use


def batch(rank: int) -> dict[str, Tensor]:
    ids = (tokens()["input_ids"] + 7 * rank) % 290 + 3
    return {"input_ids": ids, "labels": ids}


def sharded(model: Any, head: dict[str, Any] | None = None, **options: Any) -> Any:
    mesh = init_device_mesh(tiny_models.DEVICE.type, (2,))
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


@contextmanager
def two_processes(rank: int, store: str, device: str = "cpu") -> Iterator[None]:
    """This process is one of two: on the CPU with the reference, or each on a GPU of its own with what a user gets there."""
    torch.set_num_threads(1)
    on_gpu = device == "cuda"
    if on_gpu:
        tiny_models.DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(rank)
    backend = "nccl" if on_gpu else "gloo"
    # A rank that waits for one that failed gives up, instead of half an hour later.
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(minutes=2))
    with nullcontext() if on_gpu else use("reference"):
        yield
    dist.destroy_process_group()


def tolerance(on_cpu: float) -> float:
    """On a GPU Liger runs kernels of its own, whose sums have another order than those of the plain model."""
    return on_cpu if tiny_models.DEVICE.type == "cpu" else 10 * on_cpu


def work(rank: int, store: str, ways: tuple[str, ...], patch_last: bool, device: str = "cpu") -> None:
    """One process; raises if a gradient is wrong or if all the logits were made."""
    with two_processes(rank, store, device):
        base = make("llama", tie_word_embeddings=False).train()
        single = [step(twin(base), **batch(r)) for r in range(2)]
        for way in ways:
            _compare(way, base, {name: (single[0][name] + single[1][name]) / 2 for name in single[0]}, rank, patch_last)


STEPS = 4


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(rank: int, store: str, ways: tuple[str, ...], patch_last: bool, device: str = "cpu") -> None:
    """One process; raises if a patched model trains to other losses than the plain one does in one process."""
    with two_processes(rank, store, device):
        base = make("llama", tie_word_embeddings=False).train()
        expected = _losses_of_one_process(twin(base))[rank]
        for way in ways:
            begin = _zero(int(way[-1])) if way.startswith("zero") else _fsdp2
            losses = begin(twin(base), rank, patch_last)
            if max(abs(got / want - 1) for got, want in zip(losses, expected, strict=True)) > tolerance(1e-4):
                raise AssertionError(f"{way}, rank {rank}: the losses are {losses}, they must be {expected}")


def _losses_of_one_process(model: Any) -> list[list[float]]:
    """By rank and step."""
    optimizer, losses = optimizer_of(model), []
    for _ in range(STEPS):
        both = [model(**batch(rank)).loss for rank in range(2)]
        (sum(both) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([float(loss.detach()) for loss in both])
    return [list(of_rank) for of_rank in zip(*losses, strict=True)]


def _fsdp2(model: Any, rank: int, patch_last: bool) -> list[float]:
    patched_and_wrapped(model, sharded, patch_last)
    optimizer, losses = optimizer_of(model), []
    for _ in range(STEPS):
        with no_logits():
            loss = model(**batch(rank)).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _zero(stage: int) -> Callable[[Any, int, bool], list[float]]:
    def engine_of(model: Any) -> Any:
        import deepspeed

        # Else it compiles a collective of its own, for most of a minute.
        deepspeed.ops.__compatible_ops__.clear()
        # Threshold 0: otherwise small weights, so all of these, stay whole on every rank.
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": zero}
        optimizer = optimizer_of(model)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def run(model: Any, rank: int, patch_last: bool) -> list[float]:
        # DeepSpeed reads the first when it is imported; it looks for MPI if one of the others, which its launcher would set, is missing.
        os.environ.update(DS_ACCELERATOR=tiny_models.DEVICE.type, LOCAL_RANK=str(rank), RANK=str(rank))
        os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        engine, losses = patched_and_wrapped(model, engine_of, patch_last), []
        if (model.lm_head.weight.numel() == 0) != (stage == 3):
            raise AssertionError(f"ZeRO-{stage}: the head has {model.lm_head.weight.numel()} weights between the steps")
        for _ in range(STEPS):
            with no_logits():
                loss = engine(**batch(rank)).loss
                engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    return run


def _compare(way: str, base: Any, expected: dict[str, Tensor], rank: int, patch_last: bool) -> None:
    model = twin(base)
    wrapped = patched_and_wrapped(model, WAYS[way], patch_last)
    with no_logits():
        wrapped(**batch(rank)).loss.backward()
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        largest = float((whole - expected[name]).abs().max() / expected[name].abs().max())
        if largest > tolerance(1e-5):
            raise AssertionError(f"{way}: the gradient of {name} is off by {largest:.3g} of its largest element")


def patched_and_wrapped(model: Any, wrap: Callable[[Any], Any], patch_last: bool) -> Any:
    if not patch_last:
        liger_hf.apply(model)
    wrapped = wrap(model)
    if patch_last:
        liger_hf.apply(model)
    # ZeRO-3 gathers the weight of a norm by hooks on it.
    hooked = patch_last and any(layer.post_attention_layernorm._forward_pre_hooks for layer in model.model.layers)
    residuals = {} if hooked else {"add_rms_norm": 2}
    if model.liger_report.replaced != {"rms_norm": 5, **residuals, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1}:
        raise AssertionError(f"not everything was replaced: {model.liger_report}")
    return wrapped


@contextmanager
def no_logits() -> Iterator[None]:
    """All the logits of a training step are not made. (The check of apply makes some.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liger_hf.LazyLogits, "materialize", lambda self: pytest.fail("all the logits of a training step were made"))
        yield
