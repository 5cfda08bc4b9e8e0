# SPDX-License-Identifier: Apache-2.0
"""The differences in memory between a step on its device and on the fake CPU tensors of a plan.

PyTorch without CUDA cannot run a backward pass over fake CUDA tensors, so plans use fake CPU tensors everywhere. This
file has the differences: the implementations of Liger's ops, the workspaces of kernels, and the memory that libraries
reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from liger_core.kernels import KERNELS, Kernel
from liger_core.ops._token_passes import REFERENCE_BLOCK
from liger_core.ops.head.loop import Cut, chunking, summing, tiling
from liger_core.ops.head.shards import Vocabulary
from liger_core.plugins import registry
from liger_core.private_torch import (
    FakeTensor,
    argument_names,
    graph_task,
    storage_id,
    storage_uses,
    unset_fake_temporarily,
)
from liger_core.selection import Link, in_turn, ranked, settle
from liger_hf.private_transformers import without_packing
from liger_hf.rules.head import causal_loss, projection, weights

# cuBLAS has a workspace of 32 MiB on a Hopper GPU for each thread that calls it: the main thread and that of autograd.
WORKSPACES = {"cuda": 2 * (32 << 20), "cpu": 0}

Arguments = dict[str, Any]


NO_KERNELS = (
    "No backend for GPUs could be loaded, so that Liger's ops are planned as their references, which keep more; pip "
    "install liger-triton."
)


@contextmanager
def as_on(device: str, *, sharded: bool = False, written_out: bool = False) -> Iterator[list[str]]:
    """Within this context, fake CPU tensors take the code paths of a device; yields notes on those that are
    unavailable.

    sharded      weights are sharded over ranks, or gathered when used
    written_out  no fused attention supports the tensors, so attention scores are materialized
    """
    notes: list[str] = []
    with ExitStack() as stack:
        if written_out:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if device != "cpu":
            if stack.enter_context(standing_in(device, "cpu"))[-1] == "reference":
                notes.append(NO_KERNELS)
            stack.enter_context(mock.patch.object(causal_loss, "CHUNK_ELEMENTS", {}))
            if not written_out:
                stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", _fused_attention))
        stack.enter_context(mock.patch.object(torch, "rand", _drawn(torch.rand)))
        # Transformers builds a mask if it cannot check whether a row packs several texts; `liger train` never packs.
        stack.enter_context(without_packing())
        if sharded:
            for module in (causal_loss, projection):
                stack.enter_context(mock.patch.object(module, "gathered", lambda head: weights.HELD.head is not head))
        else:
            stack.enter_context(
                mock.patch.object(causal_loss, "PLAIN_WEIGHTS", (*causal_loss.PLAIN_WEIGHTS, FakeTensor))
            )
        yield notes


def _drawn(rand: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.rand, but a single number is a constant, which a model may read:

    OPT, BART and others draw one to drop a layer.
    """

    def drawn(*size: Any, **options: Any) -> Tensor:
        return torch.tensor(1.0) if size in ((), ([],), ((),)) and not options else rand(*size, **options)

    return drawn


@contextmanager
def standing_in(device: str, place: str) -> Iterator[list[str]]:
    """Fake tensors on `place` get what the automatic choice would give tensors on `device`, whether or not that can run
    here.

    Gives the names of the backends that could be loaded and support fake tensors, the last one over the others.
    """
    settle()
    found = registry()
    before = {op: op.choice for op in found.ops.values()}
    loaded: list[str] = []
    links: dict[Any, list[Link]] = {op: [] for op in before}
    # Nothing runs here, so that it does not matter whether `auto` would take a backend.
    for backend in sorted(found.backends.values(), key=lambda backend: backend.priority):
        if device in backend.device_types and backend.supports_fake_tensors:
            with suppress(Exception):
                for name, implementation in backend.table(found.ops).items():
                    links[found.ops[name]].insert(
                        0, Link(backend.name, implementation.function, implementation.function)
                    )
                loaded.append(backend.name)
    for op, tried in links.items():
        op.choice = in_turn(op, {**ranked(found, op), place: tried})
    try:
        yield loaded
    finally:
        for op, choice in before.items():
            op.choice = choice


def attention_is_written_out(device: str, dtype: torch.dtype, config: Any) -> bool:
    """On a GPU only FlashAttention supports grouped queries, and it does not support float32
    (scaled_dot_product_attention, enable_gqa)."""
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    shared = any(
        getattr(c, "num_key_value_heads", None) not in (None, getattr(c, "num_attention_heads", None)) for c in layers
    )
    return device == "cuda" and dtype == torch.float32 and shared


def replace(device: str, func: Any, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """The results of Liger's kernels and of what fake tensors do differently from the device; NotImplemented for
    everything else."""
    kernel = KERNELS.get(func)
    if kernel is None:
        if func.name() == "aten::_grouped_mm":
            return _grouped_matmul(**_named(func, args, kwargs))
        return args[0] if func is torch.ops.aten.add.Tensor and _is_added_to(args[0]) else NotImplemented
    backward = graph_task() != -1
    outputs = (
        kernel.recycle(*kernel.grouped(args))
        if kernel.recycle is not None and backward
        else _allocated(device, kernel, args)
    )
    return outputs[0] if kernel.single else outputs


def _is_added_to(total: Tensor) -> bool:
    """Whether autograd accumulates into this gradient in place: only if it owns it alone; never if it is fake.

    torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace. In a recomputed layer gradients are on.
    """
    if graph_task() == -1 or torch.is_grad_enabled() or total._is_view():
        return False
    # One use is by autograd, the other by the Python object of this call.
    return storage_uses is not None and storage_uses(storage_id(total.untyped_storage())) == 2


def _grouped_matmul(self: Tensor, mat2: Tensor, offs: Tensor | None = None, **rest: Any) -> Any:
    """The result for dtypes other than bfloat16, which kernels support and the meta function
    (torch/_meta_registrations.py) rejects."""
    if self.dtype == torch.bfloat16:
        return NotImplemented
    # Groups of rows of one matrix and matrices of the other, or groups of the dimension that is summed, or batches.
    groups = [] if self.dim() != mat2.dim() else [len(self)] if offs is None else [len(offs)]
    # Rows begin at multiples of 16 bytes.
    columns, aligned = mat2.shape[-1], 16 // self.itemsize
    return self.new_empty(*groups, self.shape[-2], -(-columns // aligned) * aligned)[..., :columns]


def _allocated(device: str, kernel: Kernel, args: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """The outputs of a kernel. Chunk sizes depend on the device: meta tensors get those of a GPU."""
    if device == "cpu":
        return kernel.allocate(*kernel.grouped(args))
    with unset_fake_temporarily():
        meta = tree_map_only(
            Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), args
        )
        outputs = kernel.allocate(*kernel.grouped(meta))
    return tuple(
        None if o is None else torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device="cpu") for o in outputs
    )


def scratch(device: str, func: Any, args: tuple[Any, ...], kwargs: Arguments) -> int:
    """The bytes of the workspace of an operation on the device."""
    kernel = KERNELS.get(func)
    held_by_kernel = None if kernel is None else HELD_BY_KERNELS.get(kernel.name.partition("::")[2])
    if held_by_kernel is not None:
        return held_by_kernel(device, _named(func, args, kwargs))
    held = SCRATCH[device].get(func.name().partition(".")[0])
    return 0 if held is None else held(_named(func, args, kwargs))


def _named(func: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    return dict(zip(argument_names(func), args, strict=False)) | kwargs


def _chunks(device: str, given: Arguments) -> int:
    """A chunk of logits, and the statistics of each row."""
    hidden, weight = given["hidden"], given["weight"]
    rows, width = hidden.shape
    needs = given.get("needs", (False, False))
    options = {name: given[name] for name in ("chunk", "budget", "accumulate_dtype")}
    length, _, _, dtype = chunking(rows, width, weight.shape[0], hidden.dtype, device, **options)
    logits = min(length, rows) * weight.shape[0]
    size = logits * hidden.itemsize + 8 * rows
    if device == "cpu":
        # The row passes of the reference allocate two float32 blocks, and a copy of the logits of one if they have
        # another dtype.
        passes = 4 * min(logits, REFERENCE_BLOCK) * (2 if hidden.itemsize == 4 else 3)
        # A matmul that is summed in another dtype copies what it multiplies.
        copies = 4 * (logits + min(length, rows) * width) if needs[1] and dtype != hidden.dtype else 0
        size += max(passes, copies)
    return int(size)


def _tiles(device: str, given: Arguments) -> int:
    """A tile of logits where not all are kept; in the backward pass also the sums of gradients that several tiles add
    to."""
    hidden, weight, wide = given["hidden"], given["weight"], given["wide"]
    (rows, width), classes, backward = hidden.shape, weight.shape[0], "moments" in given
    if given.get("derivative") is not None:
        return int(40 * rows)
    options = {name: given[name] for name in ("chunk", "budget", "accumulate_dtype")}
    sums = None if backward else _summed(device, given)
    tiles = sums or tiling(rows, width, classes, hidden.dtype, device, wide, **options)
    backward |= sums is not None
    logit = max(4, hidden.itemsize) if wide else hidden.itemsize
    kept = tiles.kept if backward or any(given["needs"]) else 0
    length = min(tiles.rows, rows)
    size = 0 if kept == classes else length * tiles.classes * logit
    copies = 0
    if backward:
        if logit != hidden.itemsize:
            size += length * tiles.classes * hidden.itemsize
        if len(tiles.blocks(classes)) > 1 and hidden.itemsize < 4 and given["needs"][0]:
            size += length * width * 4
            copies = 4 * tiles.classes * (length + width)
        if tiles.rows < rows and given["needs"][1] and tiles.dtype != weight.dtype:
            size += weight.numel() * tiles.dtype.itemsize
            copies = max(copies, 4 * length * (tiles.classes + width))
    if device == "cpu":
        # The row passes of the reference allocate float32 blocks; a matmul that is summed in another dtype copies what
        # it multiplies.
        passes = 4 * min(length * max(kept, tiles.classes), REFERENCE_BLOCK) * (7 if backward else 4)
        size += max(passes, copies)
    return int(size + 40 * rows)


def _summed(device: str, given: Arguments) -> Cut | None:
    """The cut of a forward pass that sums the derivative by hidden."""
    statistics = ("with_entropy", "with_log_normalizer", "with_mean_log_prob", "with_mean_logit", "with_collision")
    if given["needs"] != [True, False, False] or given["wide"] or any(given[name] for name in statistics):
        return None
    (rows, width), several = given["hidden"].shape, given["target"].shape[1] > 1
    classes, shared = Vocabulary(given["group"], given["start"], given["classes"]).usual(), given["group"] is not None
    return summing(
        rows,
        width,
        classes,
        given["hidden"].dtype,
        device,
        several,
        shared,
        chunk=given["chunk"],
        budget=given["budget"],
    )


def _experts(device: str, given: Arguments) -> int:
    """The rows that experts take in and give, and what they activate; in the backward pass before gradients of matrices
    are allocated."""
    x, gate_up, down, chosen = given["x"], given["gate_up"], given["down"], given["chosen"]
    rows, (_, hidden, inner) = chosen.numel(), down.shape
    size = rows * (hidden + inner) * x.itemsize
    if "needs" in given:
        results = sum(t.numel() * t.itemsize for t, need in zip((x, gate_up), given["needs"], strict=False) if need)
        size = max(rows * hidden * x.itemsize, size - results)
    # Sorting takes keys and positions twice.
    return int(size + 40 * rows)


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    """A replacement for scaled_dot_product_attention that allocates what FlashAttention allocates, not what the CPU
    kernel does."""
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(low), key.to(low), value.to(low)
    result: Tensor = _FlashAttention.apply(query, key, value)
    return result


class _FlashAttention(torch.autograd.Function):
    """Keeps its inputs, its output and a number for each row of scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        result = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, result, query.new_empty(batch, heads, tokens, dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries' gradient is accumulated in float32, and keys and values are expanded to the query heads."""
        query, key, value, *_ = ctx.saved_tensors
        batch, heads, tokens, width = query.shape
        padded, wide = -(-tokens // 128) * 128, -(-width // 32) * 32
        scratch = [query.new_empty(batch, heads, padded, wide + 1, dtype=torch.float32)]
        if key.shape[1] != heads:
            scratch += [t.new_empty(batch, heads, *t.shape[2:]) for t in (key, value)]
        query, key, value = (torch.empty_like(t) for t in (query, key, value))
        del scratch
        return query, key, value


def _embedding_backward(given: Arguments) -> int:
    """Partial sums of up to ten tokens in float32, sums per word, and sorted tokens.

    aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, which uses another kernel for few tokens.
    """
    tokens, width, words = given["indices"].numel(), given["grad_output"].shape[-1], given["num_weights"]
    if tokens <= 3072:
        return 0
    segments = tokens // 10 + min(tokens, words)
    return int(segments * -(-width // 32) * 32 * 4 + 6 * 8 * tokens)


HELD_BY_KERNELS = {
    "linear_cross_entropy": _chunks,
    "linear_tokens": _tiles,
    "linear_tokens_backward": _tiles,
    "experts": _experts,
    "experts_backward": _experts,
}
SCRATCH: dict[str, dict[str, Callable[[Arguments], int]]] = {
    "cuda": {
        "aten::embedding_dense_backward": _embedding_backward,
    },
    "cpu": {},
}
