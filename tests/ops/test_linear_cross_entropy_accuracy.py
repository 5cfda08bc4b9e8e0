# SPDX-License-Identifier: Apache-2.0
"""The gradients of linear_cross_entropy in bfloat16 against float64, beside those of plain PyTorch in bfloat16.

On a GPU the shapes are those of real heads, where sums over 64 chunks and 262144 classes show what a low-precision sum
would lose.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import linear_cross_entropy

ROWS, WIDTH = {"cpu": 256, "cuda": 4096}, {"cpu": 64, "cuda": 1024}
CLASSES = {"cpu": (1024, 4096), "cuda": (32768, 128256, 262144)}
# Classes of which the exact gradient is computed at a time.
BLOCK = 8192
# Weights of this scale give an entropy of 8 to 12 nats, nearly that of a uniform softmax, and of about 1 nat.
SCALES = {"flat": 1.0, "peaked": 8.0}

Gradients = dict[str, Tensor]


@cache
def head(device: torch.device, classes: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    rows, width = ROWS[device.type], WIDTH[device.type]
    hidden = torch.randn(rows, width, generator=draw).to(device).bfloat16()
    weight = (torch.randn(classes, width, generator=draw) * SCALES[kind] * width**-0.5).to(device).bfloat16()
    return hidden, weight, torch.randint(classes, (rows,), generator=draw).to(device)


@cache
def errors_of_plain_pytorch(device: torch.device, classes: int, kind: str) -> dict[str, float]:
    hidden, weight, target = head(device, classes, kind)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = F.cross_entropy((leaves[0] @ leaves[1].t()).float(), target)
    return errors(device, classes, kind, *torch.autograd.grad(loss, leaves))


def errors(device: torch.device, classes: int, kind: str, grad_hidden: Tensor, grad_weight: Tensor) -> dict[str, float]:
    """Relative Frobenius errors: of the gradient of hidden, of that of weight, and of its rows that no target names."""
    hidden, weight, target = head(device, classes, kind)
    x, rows = hidden.double(), hidden.shape[0]
    parts = [slice(start, min(start + BLOCK, classes)) for start in range(0, classes, BLOCK)]
    lse = torch.stack([(x @ weight[part].double().t()).logsumexp(-1) for part in parts]).logsumexp(0)
    named = torch.zeros(classes, dtype=torch.bool, device=device)
    named[target] = True
    exact_hidden = torch.zeros_like(x)
    wrong, size = torch.zeros(2, dtype=torch.float64, device=device), torch.zeros(2, dtype=torch.float64, device=device)
    for part in parts:
        block = weight[part].double()
        share = (x @ block.t() - lse[:, None]).exp_()
        inside = ((target >= part.start) & (target < part.stop)).nonzero()[:, 0]
        share[inside, target[inside] - part.start] -= 1.0
        share /= rows
        exact_hidden += share @ block
        exact = share.t() @ x
        squares = torch.stack([(grad_weight[part].double() - exact).square().sum(1), exact.square().sum(1)])
        rare = ~named[part]
        wrong += torch.stack([squares[0].sum(), squares[0][rare].sum()])
        size += torch.stack([squares[1].sum(), squares[1][rare].sum()])
    weight_error, rare_error = (wrong / size).sqrt().tolist()
    hidden_error = float((grad_hidden.double() - exact_hidden).norm() / exact_hidden.norm())
    return {"hidden": hidden_error, "weight": weight_error, "rows of weight without a target": rare_error}


@pytest.mark.parametrize("chunks", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", list(SCALES))
@pytest.mark.parametrize("size", [0, 1, 2], ids=["small", "usual", "large"])
def test_gradients_are_as_accurate_as_those_of_plain_pytorch(
    size: int, kind: str, chunks: int, device: torch.device, record_property: pytest.RecordProperty
) -> None:
    if size >= len(CLASSES[device.type]):
        pytest.skip("the largest vocabulary takes minutes on a CPU")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("an interpreter takes minutes for these shapes")
    classes = CLASSES[device.type][size]
    hidden, weight, target = head(device, classes, kind)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(*leaves, target, chunk=hidden.shape[0] // chunks)
    got = errors(device, classes, kind, *torch.autograd.grad(loss, leaves))
    plain = errors_of_plain_pytorch(device, classes, kind)
    ratios = {name: got[name] / plain[name] for name in got}
    record_property("error ÷ error of plain PyTorch", {name: round(ratio, 3) for name, ratio in ratios.items()})
    # Half a percent: which of two neighbors a product in bfloat16 is rounded to depends on its tiles.
    assert {name: ratio for name, ratio in ratios.items() if ratio > 1.005} == {}
