# SPDX-License-Identifier: Apache-2.0
"""Emulate a device on the fake CPU tensors of a plan.

PyTorch without CUDA cannot run a backward pass over fake CUDA tensors, so plans use fake CPU tensors everywhere. This
module makes up for the differences: the implementations of Liger's ops, the workspaces of kernels, and the memory that
libraries reserve.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from liger_core.kernels import KERNELS, Kernel
from liger_core.plugins import registry
from liger_core.private_names import replacing
from liger_core.private_torch import (
    ATTENTION_BACKWARD,
    efficient_attention,
    flash_attention,
    graph_task,
    storage_id,
    storage_uses,
    unset_fake_temporarily,
)
from liger_core.selection import Link, in_turn, link, ranked, settle
from liger_hf.private_transformers import without_packing
from liger_hf.rules.head.causal_loss import CHUNK_ELEMENTS

# Bytes of cuBLAS workspaces: 32 MiB on a Hopper GPU for each calling thread, the main thread and autograd's.
WORKSPACES = {"cuda": 2 * (32 << 20), "cpu": 0}

# While a plan is made, another function has its name.
ATTENTION = functional.scaled_dot_product_attention

NO_KERNELS = (
    "No backend for GPUs could be loaded, so Liger's ops are planned by their references, which keep more memory; pip "
    "install liger-triton."
)


@contextmanager
def emulating(device: str, *, written_out: bool = False, packed: bool = False) -> Iterator[list[str]]:
    """Make fake CPU tensors take the code paths of a device; yield notes on paths that are unavailable.

    written_out  no fused attention supports the tensors, so attention scores are materialized
    packed       sequences contain several documents, so attention has a mask
    """
    notes: list[str] = []
    with ExitStack() as stack:
        if written_out:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if device != "cpu":
            if stack.enter_context(choosing_as_on(device, "cpu"))[-1] == "reference":
                notes.append(NO_KERNELS)
            # Use the chunk size of other devices, not of the CPU.
            stack.callback(CHUNK_ELEMENTS.update, dict(CHUNK_ELEMENTS))
            CHUNK_ELEMENTS.clear()
            if not written_out:
                stack.enter_context(replacing(functional, "scaled_dot_product_attention", _fused_attention))
        if not packed:
            # Transformers makes a mask if it cannot read whether a row packs several texts.
            stack.enter_context(without_packing())
        yield notes


@contextmanager
def choosing_as_on(device: str, fake_device: str) -> Iterator[list[str]]:
    """Make ops choose on fake tensors of `fake_device` as on `device`, even if that cannot run here.

    Yields the names of the loaded backends that support fake tensors, the preferred one last.
    """
    settle()
    installed = registry()
    choices = {op: op.choice for op in installed.ops.values()}
    loaded: list[str] = []
    links: dict[Any, list[Link]] = {op: [] for op in choices}
    # Nothing runs, so it does not matter whether `auto` would choose a backend.
    for backend in sorted(installed.backends.values(), key=lambda backend: backend.priority):
        if device in backend.device_types and backend.supports_fake_tensors:
            with suppress(Exception):
                for name, implementation in backend.table(installed.ops).items():
                    op = installed.ops[name]
                    links[op].insert(0, link(op, backend.name, implementation))
                loaded.append(backend.name)
    for op, op_links in links.items():
        op.choice = in_turn(op, {**ranked(installed, op), fake_device: op_links})
    try:
        yield loaded
    finally:
        for op, choice in choices.items():
            op.choice = choice


def attention_is_written_out(device: str, dtype: torch.dtype, config: Any) -> bool:
    """Return whether attention scores are materialized.

    On a GPU, only FlashAttention supports grouped queries (enable_gqa of scaled_dot_product_attention), and it does not
    support float32.
    """
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    has_grouped_queries = any(
        getattr(c, "num_key_value_heads", None) not in (None, getattr(c, "num_attention_heads", None)) for c in layers
    )
    return device == "cuda" and dtype == torch.float32 and has_grouped_queries


def replace(device: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, overwrites: bool = True) -> Any:
    """Return the results of Liger's kernels, and of ops that differ on fake CPU tensors; else NotImplemented.

    In eager mode, a backward pass overwrites memory that nothing else uses.
    """
    kernel = KERNELS.get(func)
    if kernel is None:
        if func is torch.ops.aten.rand.default and not args[0]:
            # A constant, because models such as OPT and BART read a random number to drop a layer.
            return torch.tensor(1.0)
        if func.name() == "aten::_grouped_mm":
            return _grouped_matmul(*args, **kwargs)
        if overwrites and func is torch.ops.aten.add.Tensor and _accumulates_in_place(args[0]):
            return args[0]
        return NotImplemented
    if overwrites and kernel.recycle is not None and graph_task() != -1:
        outputs = kernel.recycle(*kernel.grouped(args))
    else:
        outputs = _call(device, kernel.allocate, kernel, args)
        if device != "cpu":
            outputs = tree_map_only(Tensor, lambda o: torch.empty_strided(o.shape, o.stride(), dtype=o.dtype), outputs)
    return outputs[0] if kernel.single else outputs


def _accumulates_in_place(total: Tensor) -> bool:
    """Return whether autograd on a device accumulates into this gradient in place, as it never does on fake tensors.

    It does if nothing else uses the gradient (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace). While a
    layer is recomputed, gradients are enabled.
    """
    if graph_task() == -1 or torch.is_grad_enabled() or total._is_view():
        return False
    # One use is autograd's, the other this call's Python object.
    return storage_uses is not None and storage_uses(storage_id(total.untyped_storage())) == 2


def _grouped_matmul(self: Tensor, mat2: Tensor, offs: Tensor | None = None, *rest: Any, **options: Any) -> Any:
    """Return the result for dtypes that only the meta function rejects (torch/_meta_registrations.py)."""
    if self.dtype == torch.bfloat16:
        return NotImplemented
    # Groups of rows with a matrix each, groups of the summed dimension, or batches.
    groups = [] if self.dim() != mat2.dim() else [len(self)] if offs is None else [len(offs)]
    # Rows are aligned to 16 bytes.
    columns, aligned = mat2.shape[-1], 16 // self.itemsize
    return self.new_empty(*groups, self.shape[-2], -(-columns // aligned) * aligned)[..., :columns]


def _call(device: str, function: Callable[..., Any], kernel: Kernel, args: tuple[Any, ...]) -> Any:
    """Call a function of a kernel, on meta tensors for a GPU, because chunk sizes depend on the device."""
    if device == "cpu":
        return function(*kernel.grouped(args))
    with unset_fake_temporarily():
        meta = tree_map_only(
            Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), args
        )
        return function(*kernel.grouped(meta))


def workspace(device: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of an operation's workspace on the device."""
    kernel = KERNELS.get(func)
    if kernel is not None and kernel.scratch is not None:
        return int(_call(device, kernel.scratch, kernel, args))
    if device == "cuda" and func is torch.ops.aten.embedding_dense_backward.default:
        return _embedding_backward(*args)
    if func in ATTENTION_BACKWARD:
        return _attention_backward(*args)
    return 0


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> int:
    """Return the bytes of gradients of queries in float32, and of keys and values expanded to the query heads."""
    batch, heads, tokens, width = query.shape
    padded, wide = -(-tokens // 128) * 128, -(-width // 32) * 32
    size = 4 * batch * heads * padded * (wide + 1)
    if key.shape[1] != heads:
        size += sum(t.numel() // key.shape[1] * heads * t.itemsize for t in (key, value))
    return size


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
) -> Tensor:
    """Replace scaled_dot_product_attention, to allocate the memory of FlashAttention instead of the CPU kernel's."""
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(low), key.to(low), value.to(low)
    # With a mask, a GPU uses memory-efficient attention, which converts a boolean mask to a bias.
    bias = None if attn_mask is None else attn_mask.to(query.dtype)
    if bias is not None and key.shape[:-2] != query.shape[:-2]:
        # FlashAttention takes no mask, and memory-efficient attention no grouped queries.
        with sdpa_kernel(SDPBackend.MATH):
            return ATTENTION(query, key, value, bias, *args, **options)
    if bias is None and value.shape[-1] == query.shape[-1]:
        result: Tensor = flash_attention(query, key, value)[0]
    else:
        result = efficient_attention(query, key, value, bias, compute_log_sumexp=True)[0]
    return result


def _embedding_backward(grad_output: Tensor, indices: Tensor, num_weights: int, *rest: Any) -> int:
    """Return the bytes of partial sums of up to ten tokens in float32, sums per word, and sorted tokens.

    See aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu; for few tokens, another kernel needs no workspace.
    """
    tokens, width = indices.numel(), grad_output.shape[-1]
    if tokens <= 3072:
        return 0
    segments = tokens // 10 + min(tokens, num_weights)
    return int(segments * -(-width // 32) * 32 * 4 + 6 * 8 * tokens)
