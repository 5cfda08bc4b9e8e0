# SPDX-License-Identifier: Apache-2.0
"""What linear_cross_entropy allocates, and how long its chunks are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core import linear_cross_entropy
from liger_core.ops._chunked_loss import chunk_rows
from ops.agreement import leaf
from ops.allocations import allocations

ROWS, WIDTH, CLASSES = 512, 64, 4000
LOGITS_BYTES = ROWS * CLASSES * 4
WEIGHT_BYTES = CLASSES * WIDTH * 4


def step(hidden: Tensor, weight: Tensor, **options: Any) -> None:
    target = torch.arange(ROWS, device=hidden.device)
    loss = linear_cross_entropy(hidden, weight, target, **options)
    inputs = [t for t in (hidden, weight) if t.requires_grad]
    if inputs:
        torch.autograd.grad(loss, inputs, torch.ones_like(loss))


def tensors(device: torch.device, *, hidden: bool = True, weight: bool = True) -> tuple[Tensor, Tensor]:
    pair = leaf(ROWS, WIDTH, device=device), leaf(CLASSES, WIDTH, device=device, scale=0.1)
    return pair[0].detach().requires_grad_(hidden), pair[1].detach().requires_grad_(weight)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_never_hold_all_the_logits(reduction: str, measured_device: torch.device) -> None:
    pair = tensors(measured_device)
    used = allocations(lambda: step(*pair, chunk=32, reduction=reduction), measured_device)
    assert used.largest < LOGITS_BYTES // 4


def test_one_chunk_holds_them_as_the_measurement_must_notice(measured_device: torch.device) -> None:
    pair = tensors(measured_device)
    assert allocations(lambda: step(*pair, chunk=ROWS), measured_device).largest >= LOGITS_BYTES


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_frozen_weight_gets_no_gradient_buffer(reduction: str, measured_device: torch.device) -> None:
    frozen, trained = tensors(measured_device, weight=False), tensors(measured_device)
    options = {"chunk": 8, "reduction": reduction}
    assert allocations(lambda: step(*trained, **options), measured_device).largest >= WEIGHT_BYTES
    assert allocations(lambda: step(*frozen, **options), measured_device).largest < WEIGHT_BYTES


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_evaluation_has_no_gradient_buffers(reduction: str, measured_device: torch.device) -> None:
    pair = tensors(measured_device, hidden=False, weight=False)
    used = allocations(lambda: step(*pair, chunk=8, reduction=reduction), measured_device)
    assert used.peak < WEIGHT_BYTES


def test_no_grad_has_no_gradient_buffers(measured_device: torch.device) -> None:
    pair = tensors(measured_device)

    def evaluate() -> None:
        with torch.no_grad():
            linear_cross_entropy(*pair, torch.arange(ROWS, device=measured_device), chunk=8)

    assert allocations(evaluate, measured_device).peak < WEIGHT_BYTES


def test_chunks_need_less_memory_than_the_logits_of_plain_pytorch(measured_device: torch.device) -> None:
    pair = tensors(measured_device)

    def plain() -> None:
        loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*pair), torch.arange(ROWS, device=measured_device))
        torch.autograd.grad(loss, pair)

    fused = allocations(lambda: step(*pair, chunk=32), measured_device)
    assert fused.peak < 0.5 * allocations(plain, measured_device).peak


@pytest.mark.parametrize(
    ("rows", "width", "classes", "expected"),
    [(16384, 4096, 128256, 512), (8192, 4096, 128256, 256), (16384, 2048, 32000, 1024), (1000, 4096, 4096, 1024), (3, 8, 800, 1)],
)
def test_the_chunk_of_the_report_is_its_formula(rows: int, width: int, classes: int, expected: int) -> None:
    assert expected == 2 ** math.ceil(math.log2(math.ceil(rows / math.ceil(classes / width))))
    assert chunk_rows(rows, width, classes, -1, 2, "cuda") == expected


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_chunk_of_the_budget_covers_all_rows_or_is_long(device_type: str) -> None:
    assert chunk_rows(64, 4096, 50000, 0, 2, device_type) == 64
    long = chunk_rows(1_000_000, 4096, 128256, 0, 2, device_type)
    assert (device_type == "cuda") <= (long >= 2048)
    assert long * 128256 * 2 <= 2150 << 20


def test_a_given_chunk_is_never_longer_than_the_batch() -> None:
    assert chunk_rows(10, 8, 100, 4, 4, "cpu") == 4
    assert chunk_rows(10, 8, 100, 400, 4, "cpu") == 10
