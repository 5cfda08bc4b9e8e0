# SPDX-License-Identifier: Apache-2.0
"""The checks, samples and workloads that modulated_rms_norm and modulated_layer_norm share."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DtypeError, OptionError, ShapeError
from liger_core.op import Misuse, Sample, Workload
from liger_core.ops._inputs import misuses_of, normal, normals, sample_table, sized, workloads_of


def check(op: str, x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, eps: float) -> None:
    checks.floating(op, 2, x=x, scale=scale, shift=shift, weight=weight)
    if x.dim() < 2:
        checks.misshapen(op, "x must be (…, tokens, width)", x)
    wanted = (*x.shape[:-2], x.shape[-1])
    for name, tensor in (("scale", scale), ("shift", shift)):
        if tensor is not None and tensor.shape != wanted:
            one_row = f"one row for all tokens of a sample of x {checks.shape(x)}"
            checks.misshapen(op, f"{name} must have shape {tuple(wanted)}, {one_row}", tensor)
    checks.vector(op, "weight", weight, x.shape[-1], "x", x)
    checks.positive(op, "eps", eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    n = normals(device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    yield from sample_table(
        ("one_block", (n(2, 3, 64), n(2, 64), n(2, 64)), {}, "the width is a power of two"),
        ("odd_width", (n(3, 5, 100), n(3, 100), n(3, 100)), {}, "masked lanes must not enter the statistics"),
        ("many_tokens", (n(1, sized(device, 420, 40), 12300), n(1, 12300), n(1, 12300)), {},
         "programs walk several rows of one sample"),
        ("many_samples", (n(70, 2, 24), n(70, 24), n(70, 24)), {}, "more samples than programs"),
        ("one_sample", (n(9, 40), n(40), n(40)), {}, "no sample dimension"),
        ("two_dimensions", (n(2, 3, 4, 40), n(2, 3, 40), n(2, 3, 40)), {}, "samples have two dimensions"),
        ("whole_row", (n(1, 3, 4096), n(1, 4096), n(1, 4096)), {}, "every chunk of a row is full"),
        ("last_chunk", (n(2, 5, 1100), n(2, 1100), n(2, 1100)), {}, "only the last chunk of a row is masked"),
        ("several_warps", (n(1, 3, 2200), n(1, 2200)), {}, "several warps hold a row, and no shift"),
        ("no_shift", (n(2, 6, 96), n(2, 96)), {}, "scale without shift"),
        ("frozen_modulation", (n(2, 6, 96), n(2, 96), n(2, 96)), {}, "only the gradient of x", "scale", "shift"),
        ("frozen_input", (n(2, 6, 96), n(2, 96), n(2, 96)), {}, "only the gradients of the modulation", "x"),
        ("frozen_scale", (n(2, 6, 96), n(2, 96), n(2, 96)), {}, "only the shift of the two", "scale"),
        ("chunks", (n(3, 5, 80), *n(3, 240).chunk(3, dim=-1)[1:]), {}, "scale and shift are slices of one projection"),
        ("strided_rows", (n(3, 5, 160)[..., :80], n(3, 80), n(3, 80)), {}, "rows are read through their stride"),
        ("transposed", (n(6, 3, 40).transpose(0, 1), n(3, 40), n(3, 40)), {}, "samples are not dense"),
        ("float32_modulation", (n(2, 5, 72), *(normal(device, wide, 2, 72) for _ in range(2))), {},
         "of another dtype than x"),
        ("empty", (n(2, 0, 64), n(2, 64), n(2, 64)), {}, "no rows: nothing is launched, gradients are zero"),
    )  # fmt: skip


def misuses(op: str, device: torch.device) -> Iterator[Misuse]:
    misuse = misuses_of(op)
    x, scale = torch.zeros(2, 3, 8, device=device), torch.zeros(2, 8, device=device)
    yield misuse("integers", (x.int(), scale), DtypeError, "x must have a floating dtype, got torch.int32")
    yield misuse("vector", (x[0, 0], scale[0]), ShapeError, "x must be (…, tokens, width), got (8,)")
    message = "must have shape (2, 8), one row for all tokens of a sample of x (2, 3, 8), got"
    yield misuse("scale_shape", (x, scale[0]), ShapeError, f"scale {message} (8,)")
    yield misuse("shift_shape", (x, scale, x), ShapeError, f"shift {message} (2, 3, 8)")
    yield misuse("eps_zero", (x, scale), OptionError, "eps must be a finite number > 0, got 0.0", eps=0.0)
    message = "eps must be a finite number > 0, got a tensor of shape (2, 8)"
    yield misuse("eps_tensor", (x, scale), OptionError, message, eps=scale)


def workloads() -> Iterator[Workload]:
    def draw(device: torch.device, dtype: torch.dtype, batch: int, tokens: int, width: int) -> tuple[Tensor, ...]:
        n = normals(device, dtype)
        return n(batch, tokens, width), n(batch, width), n(batch, width)

    of_size = workloads_of(draw, "BNH")
    yield of_size(2, 64, 256, quick=True)
    # DiT-XL with 256 images of 256 tokens, and FLUX.
    yield of_size(256, 256, 1152)
    yield of_size(8, 4096, 3072)
    yield of_size(16, 4096, 3072)
