# SPDX-License-Identifier: Apache-2.0
"""experts: the feed-forward networks of a mixture of experts, each on the tokens that are routed to it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from liger_core import checks
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Dtypes, Misuse, Product, Sample, Work, Workload, accumulator, op
from liger_core.ops._gated import Activation, joined_gate
from liger_core.ops._grouped import adapted_linear, grouped
from liger_core.ops._inputs import integers, misuse_table, normal, sample_table, workload

MATRICES = ("x", "gate_up", "down", "gate_up_bias", "down_bias", "gate_up_a", "gate_up_b", "down_a", "down_b")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu_squared")


def check(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, activation: Activation = "silu", limit: float | None = None, alpha: float = 1.0,
    shift: float = 0.0, interleaved: bool = False, gate_up_a: Tensor | None = None, gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None, down_b: Tensor | None = None,
) -> None:  # fmt: skip
    name = "experts"
    adapters = {"gate_up_a": gate_up_a, "gate_up_b": gate_up_b, "down_a": down_a, "down_b": down_b}
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    checks.floating(name, 4, x=x, gate_up=gate_up, down=down, weight=weight, **biases, **adapters)
    checks.same_device(name, "x", x, index=index)
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        checks.fail(DtypeError, name, f"index must have an integer dtype, got {index.dtype}")
    if x.dim() != 2:
        checks.misshapen(name, "x must be (tokens, hidden)", x, "; flatten its leading dimensions")
    if index.dim() != 2 or index.shape[0] != x.shape[0]:
        checks.misshapen(name, f"index must be (tokens, k) with the tokens of x {checks.shape(x)}", index)
    if weight.shape != index.shape:
        checks.unlike(name, "weight", weight, "index", index)
    _check_matrices(name, x, gate_up, down, gate_up_bias, down_bias)
    _check_adapter(name, "gate_up", gate_up, gate_up_a, gate_up_b)
    _check_adapter(name, "down", down, down_a, down_b)
    checks.choice(name, "activation", activation, ACTIVATIONS)
    if limit is not None:
        checks.positive(name, "limit", limit)
    checks.finite(name, "alpha", alpha)
    checks.finite(name, "shift", shift)
    if activation != "silu" and alpha != 1.0:
        wanted = f"alpha must be 1 with activation={activation!r}"
        checks.fail(OptionError, name, f"{wanted}, got {alpha!r}; only silu has a slope")
    if gate_up.shape[1] == down.shape[2] and (interleaved or shift):
        sentence = "interleaved and shift need a gate, but gate_up has as many rows as down has columns"
        checks.fail(OptionError, name, sentence)


def _check_matrices(
    name: str, x: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None
) -> None:
    hidden = x.shape[1]
    if down.dim() != 3 or down.shape[1] != hidden or not down.shape[0]:
        checks.misshapen(name, f"down must be (experts, {hidden}, inner) to match x {checks.shape(x)}", down)
    count, _, inner = down.shape
    if (
        gate_up.dim() != 3
        or (gate_up.shape[0], gate_up.shape[2]) != (count, hidden)
        or gate_up.shape[1] not in (inner, 2 * inner)
    ):
        wanted = f"({count}, {2 * inner}, {hidden}), or ({count}, {inner}, {hidden}) without a gate,"
        checks.misshapen(name, f"gate_up must be {wanted} to match down {checks.shape(down)}", gate_up)
    for which, bias, of, matrices in (
        ("gate_up_bias", gate_up_bias, "gate_up", gate_up),
        ("down_bias", down_bias, "down", down),
    ):
        if bias is not None and bias.shape != matrices.shape[:2]:
            checks.mismatch(name, which, bias, checks.shape(matrices[:, :, 0]), of, matrices)


def _check_adapter(name: str, of: str, matrices: Tensor, a: Tensor | None, b: Tensor | None) -> None:
    if a is None and b is None:
        return
    if a is None or b is None:
        alone = "b" if a is None else "a"
        checks.fail(OptionError, name, f"{of}_a and {of}_b must be given together, got {of}_{alone} alone")
    count, outer, inner = matrices.shape
    if a.dim() != 3 or (a.shape[0], a.shape[2]) != (count, inner):
        checks.misshapen(name, f"{of}_a must be ({count}, rank, {inner}) to match {of} {checks.shape(matrices)}", a)
    if b.shape != (count, outer, a.shape[1]):
        wanted = f"{(count, outer, a.shape[1])} to match {of} {checks.shape(matrices)} and {of}_a {checks.shape(a)}"
        checks.misshapen(name, f"{of}_b must be {wanted}", b)


def _calls(device: torch.device, dtype: torch.dtype) -> Callable[..., list[Any]]:
    """Return a function (tokens, k, experts, hidden, inner) → arguments whose results are of the size of x."""
    n = functools.partial(normal, device, dtype)

    def call(
        tokens: int, k: int, count: int, hidden: int, inner: int, packed: int = 2, biased: bool = False
    ) -> list[Any]:
        draws = [torch.randperm(count, device=device)[:k] for _ in range(tokens)]
        index = torch.stack(draws) if tokens else integers(device, count, 0, k)
        matrices = n(count, packed * inner, hidden, scale=hidden**-0.5), n(count, hidden, inner, scale=inner**-0.5)
        arguments = [n(tokens, hidden), *matrices, index, n(tokens, k).softmax(-1)]
        return [*arguments, n(count, 2 * inner), n(count, hidden)] if biased else arguments

    return call


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    call, n = _calls(device, dtype), functools.partial(normal, device, dtype)
    usual, biased = functools.partial(call, 30, 8, 10, 32, 64), functools.partial(call, 30, 8, 10, 32, 64, biased=True)
    yield from sample_table(
        ("one_block", call(24, 8, 16, 32, 64), {}, "all sizes are powers of two"),
        ("odd_sizes", call(45, 4, 5, 24, 300), {}, "masks on rows and columns; several column tiles are activated"),
        ("unaligned", call(31, 8, 9, 21, 93), {}, "rows do not begin at multiples of 16 bytes"),
        ("one_expert_each", call(120, 1, 6, 32, 96), {}, "no sum over experts"),
    )
    yield from _samples_of_indices(device, call)
    stored, gpt_oss = call(36, 8, 10, 32, 64, biased=True), {"limit": 2.5, "alpha": 1.702, "shift": 1.0}
    stored[1:3] = [t.mT.contiguous().mT for t in stored[1:3]]
    exact, clipped = usual(), {"activation": "gelu_tanh", "limit": 3.6875}
    gated, gateless = usual(), ([*usual(packed=1), n(10, 64)], {"activation": "relu_squared", "limit": 2.0})
    far = "where no value is within rounding of the limit"
    why, below = "matrices are stored transposed; gate and up interleave, with limits and biases", ("x", "gate_up")
    matrices, biases = ("gate_up", "down"), ("gate_up_bias", "down_bias")
    yield from sample_table(
        ("gpt_oss", stored, {**gpt_oss, "interleaved": True}, why),
        ("gelu", exact, {"activation": "gelu"}, "the exact GELU"),
        ("gelu_tanh", gated, clipped, f"GELU's tanh form; both clipped, {far}"),
        ("gateless", *gateless, "no gate, and a bias of the first matmul only"),
        ("long_rows", call(12, 2, 2, 2100, 11), {}, "a token takes several column tiles", "weight"),
        ("frozen_below_down", biased(), {}, "the gradient goes no further than the activation", *below, biases[0]),
        ("frozen_experts", biased(), {}, "no gradient of the experts", *matrices, *biases),
    )
    factors = {"gate_up_a": n(10, 3, 32, scale=0.2), "gate_up_b": n(10, 128, 3)}
    half = {"down_a": n(10, 5, 64, scale=0.1), "down_b": n(10, 32, 5)}
    factors |= half
    yield from sample_table(
        ("adapters", usual(), factors, "low-rank adapters on both matrices"),
        ("adapter_of_down", biased(), half, "an adapter on one of the matrices, beside biases"),
        ("frozen_below_adapters", usual(), factors, "adapters on frozen matrices", *matrices),
    )
    around, sliced = call(20, 4, 8, 32, 64), call(36, 8, 10, 32, 64)
    around[1:3] = [t.permute(1, 2, 0).contiguous().permute(2, 0, 1) for t in around[1:3]]
    sliced[0], sliced[4] = n(36, 40)[:, 3:35], n(36, 20)[:, 1:9]
    yield from sample_table(
        ("experts_last", around, {}, "the same element of all experts is adjacent, and no row or column"),
        ("strided_rows", sliced, {}, "x and the router weights are slices, read through their strides"),
        ("one_token", call(1, 8, 9, 56, 96), {}, "a single token; no gradient of its router weights", "weight"),
        ("empty", call(0, 2, 4, 16, 8), {}, "no tokens: gradients of the experts are zero"),
    )


def _samples_of_indices(device: torch.device, call: Callable[..., list[Any]]) -> Iterator[Sample]:
    skewed, outside = call(70, 3, 8, 32, 64), call(90, 6, 8, 32, 64)
    skewed[3] = torch.tensor([[3, 6, 3]], device=device).expand(70, 3)
    outside[3] = outside[3] + integers(device, 3, 90, 6) * 2 - 2
    nowhere, mixed = call(4, 2, 4, 16, 8), call(30, 8, 10, 32, 64)
    nowhere[3] = torch.full_like(nowhere[3], 4)
    mixed[3:] = [mixed[3].int(), mixed[4].float()]
    tiles = "two experts have several tiles of rows, one of them two rows of each token, and the others none"
    yield from sample_table(
        ("skewed", skewed, {}, tiles),
        ("outside", outside, {}, "some indices are of no expert of this rank"),
        ("nowhere", nowhere, {}, "no expert has any row"),
        ("other_dtypes", mixed, {}, "router weights have another dtype than x, and indices are short"),
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    x, gate_up, down = (torch.zeros(*shape, device=device) for shape in ((3, 8), (4, 12, 8), (4, 8, 6)))
    index, weight = torch.zeros(3, 2, dtype=torch.int64, device=device), torch.zeros(3, 2, device=device)
    good = (x, gate_up, down, index, weight)
    elsewhere = torch.zeros(3, 2, dtype=torch.int64, device="meta")
    half = torch.zeros(4, 2, 8, device=device)
    yield from misuse_table(
        "experts", good,
        ("no_tensor", DtypeError, "x must be a tensor, got NoneType", {}, None, *good[1:]),
        ("device", DeviceError, f"index must be on {x.device} like x, got meta",
         {}, *good[:3], elsewhere, weight),
        ("dtypes", DtypeError, "down must have dtype torch.float32 like x, got torch.bfloat16; cast one of them",
         {}, x, gate_up, down.bfloat16(), index, weight),
        ("float_index", DtypeError, "index must have an integer dtype, got torch.float32",
         {}, *good[:3], weight, weight),
        ("dimensions", ShapeError, "x must be (tokens, hidden), got (1, 3, 8); flatten its leading dimensions",
         {}, x[None], *good[1:]),
        ("tokens", ShapeError, "index must be (tokens, k) with the tokens of x (3, 8), got (2, 2)",
         {}, *good[:3], index[:2], weight),
        ("router", ShapeError, "weight must have the shape of index (3, 2), got (3, 1)", {}, *good[:4], weight[:, :1]),
        ("down", ShapeError, "down must be (experts, 8, inner) to match x (3, 8), got (4, 6, 8)",
         {}, x, gate_up, down.mT, index, weight),
        ("gate_up", ShapeError,
         "gate_up must be (4, 12, 8), or (4, 6, 8) without a gate, to match down (4, 8, 6), got (4, 8, 12)",
         {}, x, gate_up.mT, down, index, weight),
        ("bias", ShapeError, "down_bias must have shape (4, 8) to match down (4, 8, 6), got (8,)",
         {}, *good, None, down[0, :, 0]),
        ("activation", OptionError, "activation must be one of 'silu', 'gelu', 'gelu_tanh', 'relu_squared', got 'relu'",
         {"activation": "relu"}),
        ("limit", OptionError, "limit must be a finite number > 0, got 0", {"limit": 0}),
        ("alpha", OptionError, "alpha must be 1 with activation='gelu', got 2.0; only silu has a slope",
         {"activation": "gelu", "alpha": 2.0}),
        ("half_an_adapter", OptionError, "gate_up_a and gate_up_b must be given together, got gate_up_a alone",
         {"gate_up_a": half}),
        ("adapter_a", ShapeError, "down_a must be (4, rank, 6) to match down (4, 8, 6), got (4, 2, 8)",
         {"down_a": half, "down_b": half.mT}),
        ("adapter_b", ShapeError,
         "gate_up_b must be (4, 12, 2) to match gate_up (4, 12, 8) and gate_up_a (4, 2, 8), got (4, 8, 2)",
         {"gate_up_a": half, "gate_up_b": half.mT}),
        ("no_gate", OptionError, "interleaved and shift need a gate, but gate_up has as many rows as down has columns",
         {"interleaved": True}, x, gate_up[:, :6], down, index, weight),
    )  # fmt: skip


def workloads() -> Iterator[Workload]:
    def of_size(N: int, E: int, K: int, H: int, inner: int, quick: bool = False) -> Workload:
        def make(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
            gate_up = normal(device, dtype, E, 2 * inner, H, scale=H**-0.5)
            down = normal(device, dtype, E, H, inner, scale=inner**-0.5)
            # Biased random logits: some experts get many more tokens than others, none all of them.
            logits = normal(device, torch.float32, N, E) + normal(device, torch.float32, E, scale=0.5)
            weight, index = logits.softmax(-1).topk(K)
            return (normal(device, dtype, N, H), gate_up, down, index, weight.to(dtype)), {}

        return workload(make, "", quick, N=N, E=E, K=K, H=H, I=inner)

    yield of_size(256, 8, 2, 128, 64, quick=True)
    # Qwen3-30B-A3B, Mixtral 8x7B.
    yield of_size(32768, 128, 8, 2048, 768)
    yield of_size(4096, 128, 8, 2048, 768)
    yield of_size(8192, 8, 2, 4096, 14336)


def work(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, *biases: Tensor | None, **options: Any
) -> Work:
    """Return the work of the matmuls that a dense network of this size needs for as many rows."""
    rows, hidden = index.numel(), x.shape[1]
    outer, inner = gate_up.shape[1], down.shape[2]
    forward = (Product(rows, hidden, outer, "right"), Product(rows, inner, hidden, "right"))
    gradients = (
        Product(rows, hidden, inner), Product(rows, outer, hidden, "", "x"),
        Product(outer, rows, hidden, "left", "gate_up"), Product(hidden, rows, inner, "left", "down"),
    )  # fmt: skip
    size, flops = x.element_size(), 2 * rows * hidden * (outer + inner)
    bytes_read = (2 * x.numel() + gate_up.numel() + down.numel()) * size
    return Work(bytes_read, 3 * bytes_read, flops, 3 * flops, forward, (*forward, *gradients))


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=work,
    layout=Layout(
        {
            "x": "tokens (hidden)", "index": "tokens (k)", "weight": "tokens (k)",
            "gate_up": "(experts) (outer) (hidden)", "down": "(experts) (hidden) (inner)",
            "gate_up_bias": "(experts) (outer)", "down_bias": "(experts) (hidden)",
            "gate_up_a": "(experts) (rank) (hidden)", "gate_up_b": "(experts) (outer) (rank)",
            "down_a": "(experts) (down_rank) (inner)", "down_b": "(experts) (hidden) (down_rank)",
        },
        ("x",),
    ),
    dtypes=Dtypes((MATRICES,), matmul=True),
)  # fmt: skip
def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, activation: Activation = "silu", limit: float | None = None, alpha: float = 1.0,
    shift: float = 0.0, interleaved: bool = False, gate_up_a: Tensor | None = None, gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None, down_b: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run each token through the experts that it is routed to, and sum their outputs by the router's weights.

        y_n = Σ_k weight_nk · (down_e a + down_bias_e),   e = index_nk
        g, u = gate_up_e x_n + gate_up_bias_e             its first and last rows; or interleaved, g0 u0 g1 u1 …
        a = act(min(g, limit)) · (clamp(u, -limit, limit) + shift)
        act(g) = g · sigmoid(alpha · g)                   activation="silu"; "gelu" is the exact GELU, "gelu_tanh" its
                                                          tanh form, "relu_squared" is max(g, 0)²

    x             (tokens, hidden)              any floating dtype; under autocast, x, matrices and biases are cast
    gate_up       (experts, 2·inner, hidden)    dtype of x; (experts, inner, hidden) has no gate: a = act(min(g, limit))
    down          (experts, hidden, inner)      dtype of x; matrices that are stored transposed are passed as `.mT`
    index         (tokens, k)                   any integer dtype; outside [0, experts), as if experts are spread over
                                                ranks, nothing is added, and weight gets no gradient
    weight        (tokens, k)                   any floating dtype
    gate_up_bias  (experts, 2·inner)            dtype of x
    down_bias     (experts, hidden)             dtype of x
    limit                                       no limit by default
    gate_up_a     (experts, rank, hidden)       dtype of x: a low-rank adapter (LoRA), with which gate_up_e x is
                                                gate_up_e x + gate_up_b_e (gate_up_a_e x); its scale belongs to b
    gate_up_b     (experts, 2·inner, rank)      dtype of x
    down_a        (experts, rank, inner)        dtype of x: likewise of down, with a rank of its own
    down_b        (experts, hidden, rank)       dtype of x
    returns       (tokens, hidden)              dtype of x; activation and sum over experts are in float32. Fused
                                                backends keep x, the outputs of gate_up and the order of the rows for
                                                the backward pass, and recompute gathered rows and activations

    Raises ShapeError, DtypeError and OptionError for arguments that do not match; values of index are not checked.
    Shazeer et al. 2017, arXiv:1701.06538; Guo et al. 2025, arXiv:2512.14080.
    """
    (tokens, k), (count, hidden, inner) = index.shape, down.shape
    order, row, ends = grouped(index, count)
    valid, expert = (index >= 0) & (index < count), index.clamp(0, count - 1).long()
    wide = accumulator(x.dtype)
    rows = x.unsqueeze(1).expand(tokens, k, hidden).reshape(tokens * k, hidden).index_select(0, order)
    joined = adapted_linear(rows, gate_up, gate_up_a, gate_up_b, ends).to(wide)
    if gate_up_bias is not None:
        # Not by indexing, whose gradient several CPU threads add in any order.
        joined = joined + embedding(expert.reshape(-1)[order], gate_up_bias.to(wide))
    gate, up = joined, None
    if gate_up.shape[1] != inner:
        gate, up = (joined[:, 0::2], joined[:, 1::2]) if interleaved else joined.chunk(2, dim=-1)
    out = adapted_linear(joined_gate(gate, up, activation, limit, alpha, shift).to(x.dtype), down, down_a, down_b, ends)
    parts = out.index_select(0, row).view(tokens, k, hidden).to(wide)
    if down_bias is not None:
        parts = parts + embedding(expert, down_bias.to(wide))
    return (parts * weight.masked_fill(~valid, 0.0).to(wide).unsqueeze(-1)).sum(1).to(x.dtype)
