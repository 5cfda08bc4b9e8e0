# SPDX-License-Identifier: Apache-2.0
"""group_norm: center every group of channels and scale it to unit variance."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.layout import Layout
from liger_core.op import Misuse, Sample, Workload, accumulator, op
from liger_core.ops._inputs import misuses_of, normal, normals, row_work, sample_table, workloads_of


def check(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> None:
    name = "group_norm"
    checks.floating(name, x=x)
    if x.dim() < 2:
        checks.misshapen(name, "x must be (samples, channels, …)", x)
    checks.floating(name, x=x, weight=weight, bias=bias)
    channels = x.shape[1]
    checks.vector(name, "weight", weight, channels, "the channels of x", x)
    checks.vector(name, "bias", bias, channels, "the channels of x", x)
    checks.integer(name, "num_groups", num_groups)
    if num_groups < 1 or channels % num_groups or not channels:
        checks.fail(OptionError, name, f"num_groups must divide the channels of x {checks.shape(x)}, got {num_groups}")
    checks.positive(name, "eps", eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    yield from sample_table(
        ("one_block", (n(2, 8, 4, 16), 2, n(8), n(8)), {}, "channels are a power of two"),
        ("odd_sizes", (n(3, 6, 5, 7), 3, n(6), n(6)), {}, "masked lanes must not enter the variance"),
        ("no_space", (n(40, 12), 4, n(12), n(12)), {}, "a channel is one element"),
        ("one_group", (n(2, 6, 10), 1, n(6), n(6)), {}, "one group: a layer norm over channels and space"),
        ("instance", (n(2, 6, 10), 6, n(6), n(6)), {}, "a group for each channel: an instance norm"),
        ("long_channels", (n(1, 2, 70, 70), 1, n(2), n(2)), {},
         "a channel takes several tiles, and a group several programs"),
        ("whole_tiles", (n(1, 4, 128, 64), 2, n(4), n(4)), {}, "every tile lies in one channel: no mask, one weight"),
        ("several_tiles", (n(1, 16, 50, 50), 1, n(16), n(16)), {},
         "a program walks a channel in several tiles, one masked"),
        ("long_groups", (n(2, 3, 130, 127), 1, n(3), n(3)), {}, "no program holds a group: one walks each twice"),
    )  # fmt: skip
    held = n(67, 8, 5, 211), 2, n(8), n(8)
    yield from sample_table(
        ("held_groups", held, {},
         "groups for a whole GPU, each held by a program in several tiles, the last one masked"),
        ("many_channels", (n(1, 1100, 2), 1, n(1100), n(1100)), {},
         "a group has more channels than a program adds at once"),
        ("many_rows", (n(33, 8, 9), 4, n(8), n(8)), {}, "more groups than programs"),
        ("plain", (n(3, 6, 20), 2), {}, "neither weight nor bias"),
        ("no_bias", (n(3, 6, 20), 2, n(6)), {}, "weight without bias"),
        ("bias_only", (n(3, 6, 20), 2, None, n(6)), {}, "bias without weight"),
        ("frozen_affine", (n(3, 6, 20), 2, n(6), n(6)), {}, "no work for either", "weight", "bias"),
        ("frozen_input", (n(3, 6, 20), 2, n(6), n(6)), {}, "only the affine gradients", "x"),
        ("large_mean", (n(3, 6, 20) + 50, 2, n(6), n(6)), {}, "the variance is taken about the mean"),
        ("large_eps", (n(3, 6, 20, scale=0.01), 2, n(6), n(6), 0.1), {}, "eps dominates the variance"),
        ("channels_last", (n(3, 5, 5, 6).permute(0, 3, 1, 2), 2, n(6), n(6)), {}, "channels are adjacent in memory"),
        ("float32_weight", (n(2, 4, 9), 2, normal(device, wide, 4), normal(device, wide, 4)), {},
         "weights of another dtype than x"),
        ("empty", (n(0, 4, 9), 2, n(4), n(4)), {}, "no samples: nothing is launched, gradients are zero"),
    )  # fmt: skip


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of("group_norm")
    x, weight = torch.zeros(2, 8, 3, device=device), torch.zeros(8, device=device)
    yield misuse("integers", (x.int(), 2), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("vector", (weight, 2), ShapeError, "x must be (samples, channels, …), got (8,)")
    message = "weight must have shape (8,) to match the channels of x (2, 8, 3), got (3,)"
    yield misuse("weight_shape", (x, 2, x[0, 0]), ShapeError, message)
    yield misuse("groups", (x, 3), OptionError, "num_groups must divide the channels of x (2, 8, 3), got 3")
    yield misuse("groups_float", (x, 2.0), OptionError, "num_groups must be an integer, got 2.0")
    yield misuse("eps_negative", (x, 2, weight, weight, -1.0), OptionError, "eps must be a finite number > 0, got -1.0")


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, *sizes: int) -> tuple[Tensor | int, ...]:
        channels = sizes[1]
        return normal(device, dtype, *sizes), 32, normal(device, dtype, channels), normal(device, dtype, channels)

    of_size = workloads_of(draw, "BCHW")
    yield of_size(2, 64, 16, 16, quick=True)
    # A UNet at its first and its third resolution, and the last stage of a VAE's decoder.
    yield of_size(16, 320, 64, 64)
    yield of_size(16, 1280, 16, 16)
    yield of_size(1, 128, 512, 512)


@op(
    check=check, samples=samples, misuses=misuses, workloads=workloads, work=row_work(2, 5),
    layout=lambda x, *rest, **options: Layout(
        {"x": f"samples{' (inner)' * (x.dim() - 1)}", "weight": "(inner)", "bias": "(inner)"}, ("x",)
    ),
)  # fmt: skip
def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Center every group of neighboring channels, scale it to unit variance, then apply each channel's weight and bias.

        y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias      (over the channels of a group and all that follows)

    x           (samples, channels, ...)   any floating dtype
    num_groups  a divisor of the number of channels
    weight      (channels,)                any floating dtype; without it the factor is 1
    bias        (channels,)                any floating dtype; without it nothing is added
    eps         added to the variance, in the units of x²; > 0
    returns     (samples, channels, ...), dtype of x, dense; mean and variance are accumulated and kept in float32
                (float64 for float64)

    Raises ShapeError if x has fewer than two dimensions or weight or bias is not (channels,), DtypeError for integers,
    OptionError for eps ≤ 0 and a num_groups that does not divide the channels. Wu & He 2018, arXiv:1803.08494.
    """
    wide = accumulator(x.dtype)
    if x.numel() == 0:
        row = x.to(wide).unsqueeze(-1)
    else:
        row = x.to(wide).reshape(x.shape[0], num_groups, -1)
        row = row - row.mean(-1, keepdim=True)
        # Not · rsqrt(…), as in layer_norm.
        row = (row / torch.sqrt(row.square().mean(-1, keepdim=True) + eps)).reshape(x.shape[0], x.shape[1], -1)
    y = row.reshape(x.shape[0], x.shape[1], x.shape[2:].numel())
    if weight is not None:
        y = y * weight.to(wide)[:, None]
    if bias is not None:
        y = y + bias.to(wide)[:, None]
    return y.reshape(x.shape).to(x.dtype)
