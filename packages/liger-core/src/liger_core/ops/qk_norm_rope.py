# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope: RMSNorm of every head of queries and keys, then rotary position embedding."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.checks import Cast
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Work, Workload, op
from liger_core.ops._inputs import ROWS, misuses_of, normal
from liger_core.ops._rotary import DTYPES, HEADS, TABLE, angles, check_rotary, heads_of_tokens, rotary_table, workload
from liger_core.ops.rms_norm import rms_norm
from liger_core.ops.rope import rope


def check(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    weight_offset: float = 0.0, cast: Cast = "input", interleaved: bool = False,
) -> None:  # fmt: skip
    check_rotary("qk_norm_rope", q, k, cos, sin)
    checks.floating("qk_norm_rope", 3, q=q, q_weight=q_weight, k_weight=k_weight)
    checks.vector("qk_norm_rope", "q_weight", q_weight, q.shape[-1], "q", q)
    checks.vector("qk_norm_rope", "k_weight", k_weight, k.shape[-1], "k", k)
    checks.positive("qk_norm_rope", "eps", eps)
    checks.finite("qk_norm_rope", "weight_offset", weight_offset)
    checks.choice("qk_norm_rope", "cast", cast, ("input", "float32"))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n, table = functools.partial(normal, device, dtype), functools.partial(angles, device, dtype)
    usual = cos, sin = table(5, 16)
    pairs, gemma = {"interleaved": True}, {"weight_offset": 1.0, "cast": "float32"}

    def arguments(
        q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor] = usual, weights: Any = None, eps: float = 1e-6
    ) -> tuple[Any, ...]:
        return q, k, *(weights or (n(q.shape[-1]), n(q.shape[-1]))), *tables, eps

    def call(batch: int, heads: int, keys: int, tokens: int, width: int, *more: Any) -> tuple[Any, ...]:
        return arguments(n(batch, heads, tokens, width), n(batch, keys, tokens, width), *more)

    small = functools.partial(call, 1, 2, 2, 5, 16)
    plain, odd = call(2, 4, 2, 5, 16), call(2, 6, 3, 5, 16)
    view = arguments(*heads_of_tokens(n(2, 5, 6, 16), n(2, 5, 2, 16)))
    packed = n(2, 5, (6 + 2 + 2) * 16)
    slices = packed[..., :96].unflatten(-1, (6, 16)), packed[..., 96:128].unflatten(-1, (2, 16))
    yield from rotary_table(
        ("one_block", plain, {}, "heads and columns are powers of two"),
        ("odd_heads", odd, {}, "neither number of heads is a power of two"),
        ("view", view, {}, "(B, heads, T, D) views of (B, T, heads, D) are read through strides"),
        ("packed_projection", arguments(*heads_of_tokens(*slices)), {}, "slices of one query-key-value projection"),
    )
    columns = arguments(n(2, 4, 16, 5).transpose(2, 3), n(2, 2, 5, 16))
    per_batch, shared = (torch.stack([cos, sin]), torch.stack([sin, cos])), (cos[None], sin[None])
    inter, narrow, wide = table(5, 24, **pairs), table(5, 8, **pairs), angles(device, torch.float32, 5, 16)
    yield from rotary_table(
        ("column_strides", columns, {}, "neighboring columns of q are not neighbors in memory"),
        ("partial", call(1, 2, 1, 5, 40), {}, "columns past the rotary width are normalized, not rotated"),
        ("gemma", call(2, 4, 1, 5, 16), gemma, "1 + weight, multiplied in float32"),
        ("partial_gemma", call(1, 2, 1, 5, 24), gemma, "1 + weight on columns that are not rotated"),
        ("cast_input", arguments(n(2, 4, 5, 16, scale=30), n(2, 2, 5, 16)), {"cast": "input"},
         "rounds before the weight"),
        ("interleaved", call(2, 4, 2, 5, 24, inter), pairs, "neighboring columns are a pair"),
        ("interleaved_partial", call(1, 3, 1, 5, 20, narrow), pairs, "interleaved, partial, odd pairs"),
        ("per_batch", call(2, 3, 3, 5, 16, per_batch), {}, "cos and sin differ by batch row"),
        ("shared_batch", call(3, 2, 1, 5, 16, shared), {}, "cos and sin have a batch of one"),
    )  # fmt: skip
    halves = arguments(n(1, 2, 5, 16), n(1, 2, 5, 16), (n(5, 16), n(5, 16)))
    float32, weights = small(wide), (normal(device, torch.float32, 16), n(16))
    yield from rotary_table(
        ("unequal_halves", halves, {}, "the halves of cos and sin need not be equal"),
        ("float32_table", float32, {}, "cos and sin in another dtype than q"),
        ("float32_weight", small(usual, weights), {}, "q_weight has another dtype than q"),
        ("frozen_weights", small(), {}, "no weight gradients", "q_weight", "k_weight"),
        ("frozen_key", small(), {}, "only gradients of the query", "k", "k_weight"),
        ("only_weights", small(), {}, "only the weights' gradients", "q", "k"),
    )
    yield from _samples_of_sizes(device, dtype, arguments, call)


def _samples_of_sizes(
    device: torch.device,
    dtype: torch.dtype,
    arguments: Callable[..., tuple[Any, ...]],
    call: Callable[..., tuple[Any, ...]],
) -> Iterator[Sample]:
    n, table = functools.partial(normal, device, dtype), functools.partial(angles, device, dtype)
    long, heads, widest, pairs = table(3169, 4), table(2, 128), table(2, 1024), {"interleaved": True}
    cos, sin = table(131, 8, **pairs)
    tables, zeros = (torch.stack([cos, sin]), torch.stack([sin, cos])), torch.zeros(1, 2, 5, 16, device=device)
    tiny = arguments(n(1, 2, 5, 16, scale=0.01), n(1, 2, 5, 16), table(5, 16), None, 0.1)
    many = "several tokens a tile"
    yield from rotary_table(
        ("large_eps", tiny, {}, "eps dominates the mean square"),
        ("many_tokens", call(1, 4, 2, 3169, 4, long), {}, f"{many}, on a GPU too"),
        ("many_partial", call(2, 3, 1, 131, 20, tables), pairs, f"{many}, which differ by batch row"),
        ("many_heads", call(1, 40, 8, 2, 128, heads), {}, "the heads of q take several programs"),
        ("widest", call(1, 2, 1, 2, 1024, widest), {}, "the widest heads that Triton takes"),
        ("no_query_heads", call(2, 0, 3, 5, 16), {}, "no queries: their weight gradient is zero"),
        ("no_key_heads", call(2, 3, 0, 5, 16), {}, "no keys: their weight gradient is zero"),
        ("empty", call(0, 2, 2, 5, 16), {}, "no batch: nothing is launched, gradients are zero"),
        ("zeros", arguments(zeros.to(dtype), n(1, 2, 5, 16)), {}, "the mean square is zero: eps alone"),
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    def z(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    misuse = misuses_of("qk_norm_rope")
    q, k, w, t = z(2, 4, 5, 16), z(2, 2, 5, 16), z(16), z(5, 16)
    message = "q must have shape (batch, heads, tokens, width), got (4, 5, 16)"
    yield misuse("dimensions", (q[0], k, w, w, t, t), ShapeError, message)
    message = "k must have shape (2, heads, 5, 16) to match q (2, 4, 5, 16), got (2, 2, 6, 16)"
    yield misuse("key_tokens", (q, z(2, 2, 6, 16), w, w, t, t), ShapeError, message)
    message = "q_weight must have shape (16,) to match q (2, 4, 5, 16), got (64,)"
    yield misuse("q_weight_shape", (q, k, z(64), w, t, t), ShapeError, message)
    message = "k_weight must have shape (16,) to match k (2, 2, 5, 16), got (32,)"
    yield misuse("k_weight_shape", (q, k, w, z(32), t, t), ShapeError, message)
    message = "the rotary width of cos must be even and at most 16, the width of q, got 18"
    yield misuse("rotary_width", (q, k, w, w, z(5, 18), z(5, 18)), ShapeError, message)
    message = "k must have dtype torch.float32 like q, got torch.bfloat16; cast one of them"
    yield misuse("dtypes", (q, k.bfloat16(), w, w, t, t), DtypeError, message)
    yield misuse("no_weight", (q, k, None, w, t, t), DtypeError, "q_weight must be a tensor, got NoneType")
    elsewhere = torch.zeros(16, device="meta")
    yield misuse("device", (q, k, w, elsewhere, t, t), DeviceError, f"k_weight must be on {q.device} like q, got meta")
    yield misuse("eps_zero", (q, k, w, w, t, t, 0.0), OptionError, "eps must be a finite number > 0, got 0.0")
    message = "weight_offset must be a finite number, got '1'"
    yield misuse("offset", (q, k, w, w, t, t), OptionError, message, weight_offset="1")
    message = "cast must be one of 'input', 'float32', got 'bf16'"
    yield misuse("cast", (q, k, w, w, t, t), OptionError, message, cast="bf16")


def workloads() -> Iterator[Workload]:
    shape = functools.partial(workload, 2)
    yield shape(1, 256, 8, 2, 64, quick=True)
    # Qwen3 8B, and few heads as in Gemma 3 4B.
    yield shape(4, 4096, 32, 8, 128)
    yield shape(4, 4096, 8, 4, 256)
    for tokens in ROWS:
        yield shape(1, tokens, 32, 8, 128, "T", quick=tokens <= 1024)


def work(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Work:
    return Work(2 * (q.nbytes + k.nbytes), 5 * (q.nbytes + k.nbytes))


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=Layout(
        {"q": HEADS, "k": HEADS, "q_weight": "(width)", "k_weight": "(width)", "cos": TABLE, "sin": TABLE}, ("q", "k"),
    ),
    dtypes=DTYPES,
)  # fmt: skip
def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    weight_offset: float = 0.0, cast: Cast = "input", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalize every head of queries and keys, then rotate pairs of its columns by position-dependent angles.

        y = rope(rms_norm(x, weight, eps), cos, sin)          for x = q and x = k, each with its weight

    q                         (batch, heads, tokens, width)       any floating dtype and strides
    k                         (batch, key_heads, tokens, width)   dtype of q (under autocast both get the wider of
                              theirs); any number of heads
    q_weight, k_weight        (width,)                            any floating dtype
    cos, sin                  (tokens, R), (1, tokens, R) or (batch, tokens, R); R even, at most width; any floating
                              dtype. Columns past R are only normalized
    eps, weight_offset, cast  as in rms_norm
    interleaved               as in rope
    returns                   queries and keys, shapes, dtypes and (where dense) strides of the inputs; statistics are
                              accumulated in float32 (float64 for float64)

    Raises ShapeError for shapes that do not match, DtypeError for integers or if q and k differ, OptionError for eps ≤
    0. Dehghani et al. 2023, arXiv:2302.05442 (normalized queries and keys); Su et al. 2021, arXiv:2104.09864 (rotary
    embedding).
    """
    normed = [
        rms_norm.reference(x, weight, eps, weight_offset=weight_offset, cast=cast)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    return rope.reference(normed[0], normed[1], cos, sin, interleaved=interleaved)
