# SPDX-License-Identifier: Apache-2.0
"""Facts about linear_log_prob that its samples do not say: other formulas for it, losses built from it, what it
allocates."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import formulas
from liger_core import linear_log_prob, losses
from liger_core.ops.head.loop import Cut, tiling
from liger_core.ops.linear_log_prob import GPU_BYTES
from ops.agreement import leaf, products, saved
from ops.allocations import allocations
from ops.test_cross_entropy import some_targets
from ops.test_linear_cross_entropy import head
from ops.test_linear_cross_entropy_memory import CLASSES, LOGITS_BYTES, ROWS, tensors

RECIPE = Path(__file__).parents[2] / "docs" / "how-to" / "custom-losses.md"


@pytest.fixture
def documented() -> dict[str, Callable[..., Tensor]]:
    """The functions of the recipe, with what it imports."""
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", RECIPE.read_text(), re.DOTALL | re.MULTILINE):
        kinds = ast.Import | ast.ImportFrom | ast.FunctionDef
        defined = [node for node in ast.parse(block).body if isinstance(node, kinds)]
        exec(compile(ast.Module(defined, []), str(RECIPE), "exec"), found)
    return found


def answers(device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Hidden states of whole answers with a head, and targets whose first tokens are prompt and whose last are padding."""
    target = torch.randint(30, (4, 5), device=device)
    target[:, 0], target[1, 3:] = -100, -100
    return {"hidden": leaf(4, 5, 20, device=device), "weight": leaf(30, 20, device=device, scale=0.3)}, target


def test_an_ignored_token_has_zeros_and_no_gradient_whatever_arrives(device: torch.device) -> None:
    given, target = head(device), torch.randint(30, (9,), device=device)
    target[4] = -100
    results = linear_log_prob(**given, target=target, return_entropy=True)
    assert [bool(r[4] == 0.0) and not bool(r[4].signbit()) for r in results] == [True, True]
    cotangents = [torch.randn_like(r) for r in results]
    expected = torch.autograd.grad(results, list(given.values()), cotangents, retain_graph=True)
    for value in (torch.inf, torch.nan):
        for cotangent in cotangents:
            cotangent[4] = value
        got = torch.autograd.grad(results, list(given.values()), cotangents, retain_graph=True)
        assert not got[0][4].any()
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("which", [0, 1], ids=["log_prob", "entropy"])
def test_gradients_do_not_underflow_in_float16(which: int, device: torch.device) -> None:
    """A mean over many tokens sends 1e-6 upstream, and a probability times that is below what float16 resolves."""
    target = torch.randint(30, (9,), device=device)
    # The same logits from long hidden rows and short weights, so that the gradient of weight is a number that float16
    # can hold.
    hidden = leaf(9, 20, device=device, scale=256.0).half()
    weight = leaf(30, 20, device=device, dtype=torch.float16, scale=0.3 / 256)

    def gradient(function: Callable[..., Any], hidden: Tensor, weight: Tensor) -> Tensor:
        results = function(hidden, weight, target, return_entropy=True)
        return torch.autograd.grad((results[which] * 1e-6).sum(), weight)[0].double()

    got = gradient(linear_log_prob, hidden, weight)
    exact = gradient(formulas.linear_log_prob, hidden.double(), weight.detach().double().requires_grad_())
    # Rounding the logits to float16 costs 2⁻¹¹ a product; rounding p · 1e-6 costs all of it.
    assert (got - exact).norm() < 0.01 * exact.norm()


def test_loss_scaling_keeps_the_gradients_of_nearly_certain_tokens_in_float16(device: torch.device) -> None:
    # The other class has p = 1e-6, and p · weight is below what float16 holds unless the factor of the loss is part of
    # the product.
    hidden = torch.tensor([[4096.0]], dtype=torch.float16, device=device, requires_grad=True)
    weight = torch.tensor([[0.0034], [0.0]], dtype=torch.float16, device=device)
    factor = torch.tensor([65536.0], device=device)
    (grad,) = torch.autograd.grad(linear_log_prob(hidden, weight, torch.tensor([0], device=device)), hidden, factor)
    exact = hidden.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.log_softmax(exact @ weight.double().t(), -1)[:, 0], exact, factor.double())
    # float32 rounds 1 - p to a multiple of 6e-8.
    torch.testing.assert_close(grad.double(), expected, rtol=0.1, atol=0.0)


def test_losses_as_documented_are_those_of_liger(device: torch.device, documented: dict[str, Any]) -> None:
    given, target = answers(device)
    inputs, mask, advantage = list(given.values()), target != -100, torch.tensor([1.0, -0.5, 0.3, -2.0], device=device)
    log_prob, entropy = linear_log_prob(*inputs, target, temperature=0.7, return_entropy=True)
    # Ratios on both sides of the clip; what stands at ignored tokens must not matter.
    old = torch.where(mask, log_prob.detach() + 0.4 * torch.randn(target.shape, device=device), 3.0)
    averaging, bonus = losses.Averaging("token"), losses.Penalty(entropy=0.01)
    grpo, _ = losses.grpo((log_prob, entropy), old, advantage, mask=mask, averaging=averaging, penalty=bonus)
    dpo, _ = losses.dpo(log_prob, old, mask=mask)
    pairs = (
        (documented["grpo_loss"](*inputs, target, old, advantage, temperature=0.7, bonus=0.01), grpo),
        (documented["dpo_loss"](log_prob.sum(-1), old.where(mask, 0.0).sum(-1)), dpo),
    )
    for recipe, loss in pairs:
        torch.testing.assert_close(recipe, loss)
        grads = (torch.autograd.grad(each, inputs, retain_graph=True) for each in (recipe, loss))
        torch.testing.assert_close(*grads)


def test_ignored_rows_are_packed_out_of_large_products(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only products that take longer than the wait for their number are packed; here none is too small."""
    monkeypatch.setattr("liger_core.ops.head.head.PACK_FLOPS", 0)
    monkeypatch.setattr("liger_core.ops.head.head.PACK_TILE", 4)
    target = torch.arange(40, device=device) % 30
    target[torch.arange(40, device=device) % 3 > 0] = -100
    given = head(device, rows=40)

    def both(pack: bool) -> tuple[Tensor, ...]:
        results = linear_log_prob(**given, target=target, chunk=8, return_entropy=True, pack=pack)
        cotangents = [torch.linspace(-1, 1, 40, device=device), torch.linspace(0, 1, 40, device=device)]
        return (*results, *torch.autograd.grad(results, list(given.values()), cotangents))

    for packed, whole in zip(both(True), both(False), strict=True):
        torch.testing.assert_close(packed, whole)


# Kept whole, kept in part, recomputed in blocks of classes, and in groups of rows. One logit has 4 bytes, and all have
# 1080.
HELD = pytest.mark.parametrize("options", [{}, *({"budget": n} for n in (720, 288, 120)), {"chunk": 4}], ids=str)


@pytest.mark.parametrize("place", range(3), ids=["first", "second", "third"])
def test_the_mean_logit_keeps_its_digits_beside_a_logit_far_from_the_others(place: int, device: torch.device) -> None:
    hidden, weight = torch.randn(3, 1), torch.randn(2000, 1) / 10
    weight[place] = 400.0
    exact = (hidden.double() @ weight.double().t()).mean(-1)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    _, statistics = linear_log_prob(hidden.to(device), weight.to(device), target, return_statistics=True)
    # 4e-5 where the sum is that of the distances from the far one.
    torch.testing.assert_close(statistics.mean_logit.cpu().double(), exact, rtol=1e-6, atol=0)


@HELD
def test_the_prediction_is_the_first_largest_logit(options: dict[str, int], device: torch.device) -> None:
    given, target = head(device), some_targets(30, 9, device=device)
    with torch.no_grad():
        given["weight"][7] = given["weight"][19] = given["weight"][2]
    _, found = linear_log_prob(**given, target=target, return_statistics=True, **options)
    logits = given["hidden"] @ given["weight"].t()
    assert torch.equal(found.prediction, torch.where(target == -100, -1, logits.argmax(-1)))


def test_float32_logits_are_not_rounded(device: torch.device) -> None:
    hidden, weight = leaf(9, 64, device=device).bfloat16(), leaf(30, 64, device=device).bfloat16()
    target = torch.randint(30, (9,), device=device)
    exact = formulas.linear_log_prob(hidden.double(), weight.double(), target)
    rounded, wide = (linear_log_prob(hidden, weight, target, logits_dtype=d).double() for d in (None, torch.float32))
    assert (wide - exact).norm() < 0.01 * (rounded - exact).norm()


@pytest.mark.parametrize(
    ("rows", "classes", "budget", "expected"),
    [
        (8192, 128256, 0, Cut(8192, 128256, 128256, torch.bfloat16)),
        (8192, 151936, 0, Cut(8192, 8448, 120832, torch.bfloat16)),
        (8192, 128256, 300, Cut(8192, 8448, 2432, torch.bfloat16)),
        (65536, 128256, 0, Cut(65536, 8448, 512, torch.bfloat16)),
        (131072, 128256, 0, Cut(67456, 8448, 0, torch.bfloat16)),
        (131072, 128256, 12000, Cut(131072, 8448, 31232, torch.bfloat16)),
    ],
)
def test_a_budget_keeps_logits_then_recomputes_them_then_cuts_rows(
    rows: int, classes: int, budget: int, expected: Cut
) -> None:
    assert tiling(rows, 4096, classes, torch.bfloat16, "cuda", False, budget=budget << 20) == expected


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, 8 * ROWS])
@pytest.mark.parametrize("share", [2, 3, 8])
def test_a_call_stays_within_its_budget(
    rows: int, share: int, measured_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liger_core.ops._token_passes.REFERENCE_BLOCK", CLASSES)
    weight = tensors(measured_device)[1]
    hidden = torch.randn(rows, weight.shape[1], device=measured_device, requires_grad=True)
    target, budget = torch.arange(rows, device=measured_device) % CLASSES, ROWS * CLASSES * 4 // share

    def run() -> None:
        torch.autograd.grad(linear_log_prob(hidden, weight, target, budget=budget).sum(), (hidden, weight))

    gradients = 4 * (hidden.numel() + weight.numel())
    assert allocations(run, measured_device).peak <= gradients + budget + rows * 4 * 40 + CLASSES * 4 * 8


@pytest.mark.parametrize("options", [{"budget": 200}, {"budget": 90}, {"chunk": 3}], ids=str)
def test_recomputed_logits_come_from_matmuls_of_the_same_sizes(options: dict[str, int], device: torch.device) -> None:
    """Others round otherwise, and p would not fit the statistics of the forward pass."""
    hidden, weight = leaf(7, 4, device=device), leaf(11, 4, device=device)
    target = torch.zeros(7, dtype=torch.int64, device=device)
    log_prob, forward = products(lambda: linear_log_prob(hidden, weight, target, **options), 4)
    _, backward = products(lambda: torch.autograd.grad(log_prob.sum(), (hidden, weight))[0], 4)
    # What the forward pass alone computes is kept.
    assert len(backward) > 1
    assert forward[-len(backward) :] == backward


def test_chunks_never_hold_all_the_logits(measured_device: torch.device) -> None:
    pair, target = tensors(measured_device), torch.arange(ROWS, device=measured_device)

    def step() -> Any:
        return torch.autograd.grad(linear_log_prob(*pair, target, chunk=32).sum(), pair)

    assert allocations(step, measured_device).largest < LOGITS_BYTES // 4


@pytest.mark.parametrize("kept", [False, True], ids=["recomputed", "kept"])
def test_the_backward_pass_keeps_inputs_and_a_few_numbers_a_row_and_logits_that_fit(
    kept: bool, measured_device: torch.device
) -> None:
    pair, target = tensors(measured_device), torch.arange(ROWS, device=measured_device)
    options = {"return_entropy": True, "chunk": None if kept else 32}
    found = saved(lambda: linear_log_prob(*pair, target, **options), *pair, target)
    logits = [(ROWS, pair[1].shape[0])] if kept else []
    assert sorted(t.shape for t in found) == [(), (ROWS, 1), (ROWS, 6), *logits]


@pytest.mark.parametrize("classes", [128_256, 131_072, 151_936, 152_064])
def test_the_default_of_a_gpu_keeps_all_logits_of_8192_rows(classes: int) -> None:
    cut = tiling(8192, 4096, classes, torch.bfloat16, "cuda", False, budget=GPU_BYTES)
    assert (cut.rows, cut.kept_classes) == (8192, classes)
