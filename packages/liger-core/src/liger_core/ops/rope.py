# SPDX-License-Identifier: Apache-2.0
"""rope: rotary position embedding of queries and keys."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Work, Workload, accumulator, op
from liger_core.ops._inputs import ROWS, misuses_of, normal
from liger_core.ops._rotary import DTYPES, HEADS, TABLE, angles, check_rotary, heads_of_tokens, rotary_table, workload


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False) -> None:
    check_rotary("rope", q, k, cos, sin)
    if inplace:
        for name, tensor in (("q", q), ("k", k)):
            checks.without_overlap("rope", name, tensor)
            if tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled():
                sentence = "inplace=True must not overwrite a leaf that requires a gradient"
                checks.fail(OptionError, "rope", f"{sentence}, got such a {name}; pass inplace=False")


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = functools.partial(normal, device, dtype)

    def call(
        batch: int, heads: int, keys: int, tokens: int, width: int, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        return n(batch, heads, tokens, width), n(batch, keys, tokens, width), *tables

    usual = cos, sin = angles(device, dtype, 5, 16)
    plain, grouped = call(2, 4, 4, 5, 16, usual), call(2, 6, 2, 5, 16, usual)
    view, packed = heads_of_tokens(n(2, 5, 6, 16), n(2, 5, 2, 16)), n(2, 5, (6 + 2 + 2) * 16)
    slices = heads_of_tokens(packed[..., :96].unflatten(-1, (6, 16)), packed[..., 96:128].unflatten(-1, (2, 16)))
    per_batch, shared = (torch.stack([cos, sin]), torch.stack([sin, cos])), (cos[None], sin[None])
    expanded, pairs = (cos[None].expand(3, 5, 16), sin[None].expand(3, 5, 16)), {"interleaved": True}
    inter, narrow = (angles(device, dtype, 5, rotary, **pairs) for rotary in (24, 8))
    full, single, long = (angles(device, *sizes) for sizes in ((torch.float32, 5, 16), (dtype, 1, 12), (dtype, 37, 6)))
    yield from rotary_table(
        ("plain", plain, {}, "as many key heads as query heads"),
        ("grouped", grouped, {}, "grouped-query heads, not a power of two"),
        ("view", (*view, *usual), {}, "(B, heads, T, D) views of (B, T, heads, D) are read through strides"),
        ("packed_projection", (*slices, *usual), {}, "slices of one query-key-value projection"),
        ("partial", call(1, 2, 1, 5, 40, usual), {}, "the columns past the rotary width pass unchanged"),
        ("per_batch", call(2, 3, 3, 5, 16, per_batch), {}, "cos and sin differ by batch row"),
        ("shared_batch", call(3, 2, 1, 5, 16, shared), {}, "cos and sin have a batch of one"),
        ("expanded_batch", call(3, 2, 1, 5, 16, expanded), {}, "cos and sin are expanded: stride 0 over the batch"),
        ("interleaved", call(2, 4, 2, 5, 24, inter), pairs, "neighboring columns are a pair"),
        ("interleaved_partial", call(1, 3, 1, 5, 20, narrow), pairs, "interleaved, partial, odd pairs"),
    )
    halves = n(5, 16), n(5, 16)
    yield from rotary_table(
        ("unequal_halves", call(1, 2, 2, 5, 16, halves), {}, "the two halves of cos and sin need not be equal"),
        ("float32_table", call(1, 2, 2, 5, 16, full), {}, "cos and sin in another dtype than q"),
        ("frozen_key", call(1, 2, 2, 5, 16, usual), {}, "only the query's gradient", "k"),
        ("one_token", call(2, 3, 1, 1, 12, single), {}, "one token, rotary width not a power of two"),
        ("many_tokens", call(1, 2, 1, 37, 6, long), {}, "several tokens per program, tokens not a multiple of them"),
        ("unrelated_heads", call(2, 5, 3, 5, 16, usual), {}, "the heads of q and k need not divide each other"),
        ("no_query_heads", call(2, 0, 3, 5, 16, usual), {}, "without queries the keys turn all the same"),
        ("no_key_heads", call(2, 3, 0, 5, 16, usual), {}, "without keys the queries turn all the same"),
        ("empty", call(0, 2, 2, 5, 16, usual), {}, "no batch: nothing is launched"),
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    def z(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    misuse = misuses_of("rope")
    q, k, t = z(2, 4, 5, 16), z(2, 2, 5, 16), z(5, 16)
    yield misuse(
        "dimensions", (q[0], k, t, t), ShapeError, "q must have shape (batch, heads, tokens, width), got (4, 5, 16)"
    )
    message = "k must have shape (2, heads, 5, 16) to match q (2, 4, 5, 16), got (2, 2, 6, 16)"
    yield misuse("key_tokens", (q, z(2, 2, 6, 16), t, t), ShapeError, message)
    message = "cos must have shape (5, rotary), (1, 5, rotary) or (2, 5, rotary) to match q (2, 4, 5, 16), got (6, 16)"
    yield misuse("cos_tokens", (q, k, z(6, 16), z(6, 16)), ShapeError, message)
    message = "cos must have shape (5, rotary) or (1, 5, rotary) to match q (1, 4, 5, 16), got (6, 16)"
    yield misuse("cos_tokens_of_one", (q[:1], k[:1], z(6, 16), z(6, 16)), ShapeError, message)
    message = "the rotary width of cos must be even and at most 16, the width of q, got 18"
    yield misuse("rotary_width", (q, k, z(5, 18), z(5, 18)), ShapeError, message)
    yield misuse("sin_shape", (q, k, t, t[:, :8]), ShapeError, "sin must have the shape of cos (5, 16), got (5, 8)")
    message = "k must have dtype torch.float32 like q, got torch.bfloat16; cast one of them"
    yield misuse("dtypes", (q, k.bfloat16(), t, t), DtypeError, message)
    elsewhere = torch.zeros(5, 16, device="meta")
    yield misuse("device", (q, k, elsewhere, t), DeviceError, f"cos must be on {q.device} like q, got meta")
    message = "inplace=True needs q with memory for every element, got an expanded tensor; pass q.contiguous()"
    yield misuse("inplace_expanded", (q[:1].expand(2, 4, 5, 16), k, t, t), OptionError, message, inplace=True)
    message = "inplace=True must not overwrite a leaf that requires a gradient, got such a q; pass inplace=False"
    yield misuse("inplace_leaf", (z(2, 4, 5, 16).requires_grad_(), k, t, t), OptionError, message, inplace=True)


def workloads() -> Iterator[Workload]:
    shape = functools.partial(workload, 0)
    yield shape(1, 256, 8, 2, 64, quick=True)
    # The first shape is host-bound on a GPU.
    for batch, tokens in ((1, 512), (4, 4096)):
        yield shape(batch, tokens, 32, 8, 128)
    for tokens in ROWS:
        yield shape(1, tokens, 32, 8, 128, "T", quick=tokens <= 1024)
    for heads in (4, 8, 16, 32, 64):
        yield shape(2, 4096, heads, 4, 128, "heads")


def work(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Work:
    return Work(2 * (q.nbytes + k.nbytes), 4 * (q.nbytes + k.nbytes))


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=Layout({"q": HEADS, "k": HEADS, "cos": TABLE, "sin": TABLE}, ("q", "k")),
    dtypes=DTYPES,
)  # fmt: skip
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of columns of queries and keys by position-dependent angles.

        y = x · cos + rotate(x) · sin          on the first R columns; the others pass unchanged
        rotate(x) = (-x[R/2:R], x[:R/2])                          interleaved=False
        rotate(x) = (-x[1], x[0], -x[3], x[2], …)                 interleaved=True

    q            (batch, heads, tokens, width)       any floating dtype and strides
    k            (batch, key_heads, tokens, width)   dtype of q (under autocast both get the wider of theirs); any
                 number of heads
    cos, sin     (tokens, R), (1, tokens, R) or (batch, tokens, R); R even, at most width; any floating dtype
    interleaved  pairs are neighboring columns (True), or a column of each half (False)
    inplace      overwrite q and k and return them; the mutation is declared to autograd. Neither may be an expanded
                 tensor
    returns      q and k rotated, shapes, dtypes and (where dense) strides of the inputs; computed in float32 (float64
                 for float64)

    Raises ShapeError for shapes that do not match, DtypeError if q and k differ, OptionError for inplace on a leaf that
    requires a gradient or on an expanded tensor. Su et al. 2021, arXiv:2104.09864.
    """
    wide = accumulator(q.dtype)
    cos, sin = (t.to(wide).unsqueeze(-3) for t in (cos, sin))
    rotated = tuple(_rotated(x, cos, sin, interleaved) for x in (q, k))
    if not inplace:
        return rotated[0], rotated[1]
    return q.copy_(rotated[0]), k.copy_(rotated[1])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary = cos.shape[-1]
    columns = x[..., :rotary].to(cos.dtype)
    if interleaved:
        turned = torch.stack((-columns[..., 1::2], columns[..., 0::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-columns[..., rotary // 2 :], columns[..., : rotary // 2]), dim=-1)
    y = (columns * cos + turned * sin).to(x.dtype)
    return y if rotary == x.shape[-1] else torch.cat((y, x[..., rotary:]), dim=-1)
