# SPDX-License-Identifier: Apache-2.0
"""What linear_cross_entropy allocates, and how long its chunks are."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core import linear_cross_entropy
from liger_core.ops.head import head
from liger_core.ops.head.loop import chunking
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
def test_chunks_never_hold_all_the_logits_as_one_chunk_does(reduction: str, measured_device: torch.device) -> None:
    pair, options = tensors(measured_device), {"reduction": reduction}
    assert allocations(lambda: step(*pair, chunk=32, **options), measured_device).largest < LOGITS_BYTES // 4
    assert allocations(lambda: step(*pair, chunk=ROWS, **options), measured_device).largest >= LOGITS_BYTES


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_frozen_weight_gets_no_gradient_buffer(reduction: str, measured_device: torch.device) -> None:
    frozen, trained = tensors(measured_device, weight=False), tensors(measured_device)
    options = {"chunk": 8, "reduction": reduction}
    assert allocations(lambda: step(*trained, **options), measured_device).largest >= WEIGHT_BYTES
    assert allocations(lambda: step(*frozen, **options), measured_device).largest < WEIGHT_BYTES


def test_no_grad_has_no_gradient_buffers(measured_device: torch.device) -> None:
    pair = tensors(measured_device)

    def evaluate() -> None:
        with torch.no_grad():
            linear_cross_entropy(*pair, torch.arange(ROWS, device=measured_device), chunk=8)

    assert allocations(evaluate, measured_device).peak < WEIGHT_BYTES


@pytest.mark.parametrize(
    ("rows", "width", "classes", "expected"),
    [(16384, 4096, 128256, 512), (8192, 4096, 128256, 256), (16384, 2048, 32000, 1024), (1000, 4096, 4096, 1024), (3, 8, 800, 1)],
)  # fmt: skip
def test_the_chunk_of_the_report_is_its_formula(rows: int, width: int, classes: int, expected: int) -> None:
    assert expected == 2 ** math.ceil(math.log2(math.ceil(rows / math.ceil(classes / width))))
    assert chunking(rows, width, classes, torch.bfloat16, "cuda", chunk=-1).rows == expected


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_default_chunk_covers_all_rows_or_is_long(device_type: str) -> None:
    assert chunking(64, 4096, 50000, torch.bfloat16, device_type)[:4:3] == (64, torch.bfloat16)
    long = chunking(1_000_000, 4096, 128256, torch.bfloat16, device_type)
    assert (device_type == "cuda") <= (long.rows >= 2048)
    assert long.rows * 128256 * 2 <= 2150 << 20
    assert long.dtype == torch.float32


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("width", "expected"), [(2048, (4096, FP32)), (4096, (8192, BF16))])
def test_two_long_halves_are_the_default_where_they_take_less_than_one_chunk(width: int, expected: Any) -> None:
    """Half of the logits against a gradient of weight that is kept in float32 meanwhile."""
    assert chunking(8192, width, 128256, BF16, "cuda")[:4:3] == expected


@pytest.mark.parametrize(
    ("budget", "rows", "dtype"),
    [(300, 1024, BF16), (1900, 4096, BF16), (2100, 4096, FP32), (4096, 8192, FP32), (9000, 32768, BF16)],
)
def test_a_budget_buys_long_chunks_then_a_float32_sum_then_one_chunk(budget: int, rows: int, dtype: Any) -> None:
    assert chunking(32768, 4096, 128256, BF16, "cuda", budget=budget << 20)[:4:3] == (rows, dtype)
    # A sum of float16 is always one of float32.
    assert chunking(32768, 4096, 128256, torch.float16, "cuda", budget=300 << 20).dtype == FP32


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_call_stays_within_its_budget(
    reduction: str, measured_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget counts what is held beside the inputs and gradients; losses and log-sum-exps are a few bytes a row."""
    monkeypatch.setattr("liger_core.ops._token_passes.REFERENCE_BLOCK", CLASSES)
    pair, budget = tensors(measured_device), 32 * CLASSES * 4
    options = {"budget": budget, "reduction": reduction, "accumulate_dtype": torch.float32}
    used = allocations(lambda: step(*pair, **options), measured_device)
    gradients = sum(t.numel() * 4 for t in pair)
    assert used.peak <= gradients + budget + ROWS * 4 * 16 + CLASSES * 4 * 4


def test_a_freed_graph_gives_its_sums_as_gradients(measured_device: torch.device) -> None:
    pair = tensors(measured_device)

    def backward(keep: bool) -> int:
        loss = linear_cross_entropy(*pair, torch.arange(ROWS, device=measured_device), chunk=32)
        return allocations(lambda: torch.autograd.grad(loss, pair, retain_graph=keep), measured_device).peak

    assert backward(True) >= WEIGHT_BYTES
    assert backward(False) < WEIGHT_BYTES // 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_cuda_graph_keeps_ignored_rows_whose_number_the_host_would_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "PACK_FLOPS", 0)
    hidden, weight = (torch.randn(size, 64, device="cuda", requires_grad=True) for size in (1024, 1000))
    target = torch.randint(1000, (1024,), device="cuda")
    target[::2] = -100

    def step() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(hidden, weight, target)
        # Detached: a graph that is kept would make the capture wait for the stream of the first step.
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.testing.assert_close(captured, expected)
