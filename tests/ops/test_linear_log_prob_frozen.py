# SPDX-License-Identifier: Apache-2.0
"""linear_log_prob where hidden alone needs a gradient and the logits do not fit: its derivative is summed in the
forward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuzz import formulas
from liger_core import linear_log_prob, use
from liger_core.ops.head.head import Head
from liger_core.ops.head.loop import LONG_CHUNK, MULTIPLE, ChunkOptions, held_bytes
from liger_core.ops.head.shards import vocabulary
from ops.agreement import disagreements

pytestmark = pytest.mark.slow

ROWS, WIDTH, CLASSES = 12, 16, 300
# Beyond the sums of all rows, a third of the logits.
BUDGET = ROWS * (8 * WIDTH + CLASSES)


def hidden_and_weight(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Largest logits that rise from block to block of classes, of some rows by more than the reference may stay behind."""
    growing = torch.linspace(0.1, 4.0, CLASSES, device=device)[:, None]
    hidden = torch.randn(ROWS, WIDTH, device=device).to(dtype).requires_grad_()
    return hidden, (torch.randn(CLASSES, WIDTH, device=device) * growing).to(dtype)


def targets(device: torch.device, several: int = 0) -> Tensor:
    target = torch.randint(CLASSES, (ROWS, several) if several else (ROWS,), device=device)
    target[1], target[-1] = -100, CLASSES - 1
    if several:
        # Some ignored, some twice.
        target[3, 1:], target[4] = -100, int(target[4, 0])
    return target


def matmuls(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result, and how many multiplications of hidden by the whole weight its matmuls amount to."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        result = run()
    shapes = [event.input_shapes[:2] if event.name == "aten::mm" else event.input_shapes[1:3] for event in profiler.events()
              if event.name in ("aten::mm", "aten::addmm")]  # fmt: skip
    return result, sum(a[0] * a[1] * b[1] for a, b in shapes) / (ROWS * WIDTH * CLASSES)


@pytest.mark.parametrize("several", [0, 1, 5])
def test_a_frozen_head_has_two_matmuls_and_none_in_the_backward_pass(several: int, device: torch.device) -> None:
    hidden, weight = hidden_and_weight(device)
    target = targets(device, several)
    log_prob, forward = matmuls(lambda: linear_log_prob(hidden, weight, target, budget=BUDGET, pack=False))
    _, backward = matmuls(lambda: torch.autograd.grad(log_prob.sum(), hidden)[0])
    assert (forward, backward) == (2.0, 0.0)


@pytest.mark.parametrize(
    "options",
    [{"budget": 1 << 20}, {"return_entropy": True}, {"chunk": 4}, {"trained": True}],
    ids=["fits", "entropy", "chunk", "trained"],
)
def test_the_derivative_is_not_summed_where_it_does_not_pay_or_hold(
    options: dict[str, Any], device: torch.device
) -> None:
    hidden, weight = hidden_and_weight(device)
    given = {"budget": None if "chunk" in options else BUDGET, **options}
    weight.requires_grad_(given.pop("trained", False))
    _, forward = matmuls(lambda: linear_log_prob(hidden, weight, targets(device), pack=False, **given))
    assert forward == 1.0


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few_rows_at_a_time": {"budget": ROWS * CLASSES},
    "no_packing": {"pack": False},
    "scale_softcap_temperature": {"logit_scale": 0.5, "softcap": 5.0, "temperature": 0.7},
    "negative_scale": {"logit_scale": -0.5},
    "zero_scale": {"logit_scale": 0.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("several", [0, 1, 5, 64])
@pytest.mark.parametrize("values", ["usual", "certain", "offset", "temperatures"])
def test_the_derivative_of_a_frozen_head_is_that_of_the_log_softmax(
    options: dict[str, Any], several: int, values: str, device: torch.device
) -> None:
    hidden, weight = hidden_and_weight(device)
    target, bias = targets(device, several), torch.randn(CLASSES, device=device)
    given = {"budget": BUDGET + 4 * ROWS * WIDTH, **options}
    if values == "certain":
        bias[target.view(ROWS, -1)[-1, 0]] += 30.0
    elif values == "offset":
        # 100 would saturate the softcap, and leave rounding errors alone of the gradient.
        bias += 10.0 if "softcap" in given else 100.0
    elif values == "temperatures":
        given["temperature"] = torch.linspace(0.4, 3.0, ROWS, device=device)

    call, formula = (partial(f, target=target, **given) for f in (linear_log_prob, formulas.linear_log_prob))
    assert disagreements(call, formula, hidden=hidden, weight=weight, bias=bias) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("several", [0, 5])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("certain", [False, True], ids=["uncertain", "certain"])
def test_nothing_cancels_in_16_bits(
    certain: bool, softcap: float | None, several: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Where the model is certain the gradient is small, but its error is as small as where logits are recomputed."""
    hidden, weight = hidden_and_weight(device, dtype)
    target = targets(device, several)
    bias = torch.zeros(CLASSES, device=device)
    if certain:
        # One class has a probability of more than 0.99.
        hidden = (hidden.detach() * 0.1).requires_grad_()
        target[target != -100], bias[200] = 200, 12.0
    upstream = torch.randn(target.shape, device=device)

    def gradient(trained: bool, dtype: torch.dtype) -> Tensor:
        x, w, b = hidden.detach().to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(trained), bias.to(dtype)
        budget = None if dtype == torch.float64 else BUDGET
        log_prob = linear_log_prob(x, w, target, bias=b, softcap=softcap, budget=budget)
        return torch.autograd.grad(log_prob, x, upstream.to(log_prob.dtype))[0].double()

    with use("reference"):
        exact = gradient(True, torch.float64)
    again, got = gradient(True, dtype), gradient(False, dtype)
    assert not torch.equal(got, again)
    assert (got - exact).norm() <= 1.5 * (again - exact).norm()


def test_an_ignored_row_has_nothing_whatever_it_is(device: torch.device) -> None:
    hidden, weight = hidden_and_weight(device)
    with torch.no_grad():
        hidden[1] = torch.inf
    log_prob = linear_log_prob(hidden, weight, targets(device), budget=BUDGET, pack=False)
    (gradient,) = torch.autograd.grad(log_prob, hidden, torch.where(log_prob == 0, torch.inf, 1.0))
    assert gradient.isfinite().all()
    assert not gradient[1].any()


@pytest.mark.parametrize("rows", [4096, 7000, 32768])
@pytest.mark.parametrize("budget", [100 << 20, 512 << 20, 0])
def test_blocks_of_a_derivative_are_even_and_its_memory_fits(rows: int, budget: int) -> None:
    width, classes, dtype = 4096, 128256, torch.bfloat16
    with FakeTensorMode():
        hidden, weight = (torch.empty(n, width, dtype=dtype, device="cuda") for n in (rows, classes))
        head = Head(hidden, weight, torch.empty(rows, 1, dtype=torch.int64, device="cuda"), None)
    cut = ChunkOptions.from_arguments(None, None, budget or None, True, None).derivative(head, vocabulary(weight, None))
    if cut is None:
        # All logits fit.
        assert rows * classes * dtype.itemsize <= held_bytes(budget, "cuda")
        return
    blocks = -(-classes // cut.classes)
    assert blocks * cut.classes - classes < blocks * MULTIPLE
    assert cut.rows == rows or cut.rows % (LONG_CHUNK if cut.rows >= LONG_CHUNK else MULTIPLE) == 0
    assert cut.rows * (width * 4 + cut.classes * 2) <= held_bytes(budget, "cuda")
