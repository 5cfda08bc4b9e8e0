# SPDX-License-Identifier: Apache-2.0
"""Facts about linear_divergence, kl_div, jsd and total_variation that their samples do not say: other formulas, TRL's,
what is held."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_core
from fuzz import formulas
from liger_core import jsd, kl_div, linear_divergence, total_variation
from liger_core.ops._divergence import KINDS, REFERENCE_BLOCK
from ops.agreement import leaf, products
from ops.allocations import allocations
from ops.test_cross_entropy import some_targets

pytestmark = pytest.mark.slow

KIND = pytest.mark.parametrize("kind", KINDS)
# Rows of one block, and such that the kernels take in several.
NUMBER_OF_CLASSES = pytest.mark.parametrize("width", [300, 9000])
REDUCTION = pytest.mark.parametrize("reduction", ["mean", "none"])
# Rows and classes of a head whose logits show among what is allocated.
ROWS, CLASSES, WIDTH = 2048, 8192, 32
LOGITS = ROWS * CLASSES * 4


def heads(device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A student of width 20 and a teacher of width 12."""
    return {
        "hidden": leaf(9, 20, device=device, dtype=dtype),
        "weight": leaf(30, 20, device=device, dtype=dtype, scale=0.3),
        "teacher_hidden": torch.randn(9, 12, device=device).to(dtype),
        "teacher_weight": torch.randn(30, 12, device=device).to(dtype) * 0.5,
    }


def of_logits(kind: str, source: Any = liger_core) -> Callable[[Tensor, Tensor], Tensor]:
    """The op on logits for a kind, row by row, or its formula in plain PyTorch."""
    if kind in ("jsd", "total_variation"):
        return partial(getattr(source, kind), reduction="none")
    return partial(source.kl_div, skew=0.5 if "skewed" in kind else 0.0, reverse="reverse" in kind, reduction="none")


@KIND
@NUMBER_OF_CLASSES
def test_a_student_close_to_its_teacher_has_a_divergence_of_all_digits(
    kind: Any, width: int, device: torch.device
) -> None:
    teacher = torch.randn(4, width, device=device, dtype=torch.float64)
    student = (teacher + 1e-3 * torch.randn(4, width, device=device, dtype=torch.float64)).float()
    teacher = teacher.float()
    # In float32 plain PyTorch is off by half of it.
    exact = of_logits(kind, formulas)(student.double(), teacher.double())
    tolerance = 1e-3 if kind == "total_variation" else 1e-4
    torch.testing.assert_close(of_logits(kind)(student, teacher).double(), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_class_far_from_the_others_costs_a_kl_no_digits(side: str, device: torch.device) -> None:
    """Relative to that class all the others are off by as much, which cancels but for a part in the number of classes."""
    flat, peaked = 1e-3 * torch.randn(2, 4, 9000, device=device)
    peaked[:, 5] += 1.0
    student, teacher = (peaked, flat) if side == "student" else (flat, peaked)
    exact = formulas.kl_div(student.double(), teacher.double(), reduction="none")
    torch.testing.assert_close(kl_div(student, teacher, reduction="none").double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("scale", "offset", "temperature"),
    [(30.0, 0.0, 1.0), (0.3, 0.0, 1.0), (1e-3, 0.0, 2.7), (1e-3, 0.0, 1.0), (1e-2, 3e4, 1.0), (1.0, 3e4, 0.25)],
)
def test_a_wide_kl_and_its_gradient_are_exact_for_logits_of_any_size(
    scale: float, offset: float, temperature: float, device: torch.device
) -> None:
    student = (scale * torch.randn(3, 9000, device=device) + offset).requires_grad_()
    teacher = scale * torch.randn(3, 9000, device=device) - offset
    precise = student.detach().double().requires_grad_()
    exact = formulas.kl_div(precise, teacher.double(), temperature=temperature, reduction="none")
    loss = kl_div(student, teacher, temperature=temperature, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    (slope,), (exact_slope,) = torch.autograd.grad(loss.sum(), student), torch.autograd.grad(exact.sum(), precise)
    # A round-off of q and p relative to their difference.
    assert (slope.double() - exact_slope).norm() <= 1e-6 / min(scale / temperature, 1.0) * exact_slope.norm()


def test_a_mixture_with_little_of_the_student_keeps_the_digits_of_classes_that_it_has_alone(
    device: torch.device,
) -> None:
    student, teacher = torch.tensor([1.54, -0.29], device=device), torch.tensor([46.2, -8.8], device=device)
    exact = formulas.jsd(student.double(), teacher.double(), beta=0.999, reduction="none")
    torch.testing.assert_close(jsd(student, teacher, beta=0.999, reduction="none").double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("padding", [0, 9000])
def test_a_class_that_one_side_rules_out_is_infinite_for_one_kl_and_finite_for_the_other(
    padding: int, device: torch.device
) -> None:
    student, teacher = torch.full((2, 1, 3 + padding), torch.finfo(torch.float32).min, device=device)
    student[0, :3], teacher[0, :3] = 0.0, 0.0
    student[0, 2] = -torch.inf
    half = torch.tensor(1.5, device=device).log()
    assert kl_div(student, teacher) == torch.inf
    torch.testing.assert_close(kl_div(student, teacher, reverse=True), half)
    torch.testing.assert_close(kl_div(teacher, student), half)
    assert kl_div(teacher, student, reverse=True) == torch.inf
    assert jsd(student, teacher).isfinite()
    torch.testing.assert_close(total_variation(student, teacher), torch.tensor(1 / 3, device=device))


@KIND
@NUMBER_OF_CLASSES
def test_a_nan_among_the_logits_of_a_row_is_its_divergence(kind: Any, width: int, device: torch.device) -> None:
    student, teacher = torch.randn(2, 4, width, device=device)
    student[0, 7], teacher[1, width - 1], teacher[2, 7] = torch.nan, torch.nan, torch.inf
    loss = of_logits(kind)(student.requires_grad_(), teacher)
    assert loss.isnan().tolist() == [True, True, True, False]
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert gradient.isnan().any(-1).tolist() == [True, True, True, False]


@KIND
@NUMBER_OF_CLASSES
def test_the_lowest_numbers_are_impossible_classes_or_equal_ones(kind: Any, width: int, device: torch.device) -> None:
    student, teacher = torch.randn(2, 2, width, device=device)
    student[0, 3:200], teacher[0, 3:200] = (torch.finfo(torch.float32).min,) * 2
    student[1], teacher[1] = (torch.finfo(torch.float32).min,) * 2
    (possible,) = torch.where(torch.arange(width) // 200 + (torch.arange(width) < 3) > 0)
    expected = of_logits(kind)(student[:1, possible], teacher[:1, possible])[0]
    torch.testing.assert_close(of_logits(kind)(student, teacher), torch.stack([expected, torch.zeros_like(expected)]))


@KIND
@pytest.mark.parametrize("chunk", [None, 2], ids=["kept", "recomputed"])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "not_packed"])
def test_an_ignored_row_has_nothing_whatever_arrives(
    kind: Any, chunk: int | None, pack: bool, device: torch.device
) -> None:
    given, target = heads(device), some_targets(30, 9, device=device)
    given["teacher_hidden"][target == -100] = torch.nan
    if pack and device.type == "cpu":
        # A matmul that has the row makes NaN of 0 · ∞.
        with torch.no_grad():
            given["hidden"][target == -100] = torch.inf
    options = {"kind": kind, "target": target, "chunk": chunk, "hard_weight": 0.3, "pack": pack}
    loss = linear_divergence(**given, reduction="none", **options)
    upstream = torch.where(target == -100, torch.inf, 1.0)
    of_hidden, of_weight = torch.autograd.grad(loss, (given["hidden"], given["weight"]), upstream)
    assert not loss[target == -100].any()
    assert not of_hidden[target == -100].any()
    assert of_hidden.isfinite().all()
    assert of_weight.isfinite().all()


@KIND
@REDUCTION
def test_kept_and_recomputed_logits_give_the_same_gradients(kind: Any, reduction: Any, device: torch.device) -> None:
    given = heads(device)
    inputs = given["hidden"], given["weight"]
    upstream = torch.randn(9, device=device) if reduction == "none" else None
    kept, *recomputed = (
        torch.autograd.grad(linear_divergence(**given, kind=kind, reduction=reduction, **options), inputs, upstream)
        for options in ({}, {"chunk": 4}, {"budget": 9 * 30 * 4})
    )
    for gradients in recomputed:
        torch.testing.assert_close(gradients, kept)


def test_recomputed_logits_come_from_matmuls_of_the_same_sizes(device: torch.device) -> None:
    """Others round otherwise, and p would not fit the moments of the forward pass."""
    given = heads(device)
    loss, forward = products(lambda: linear_divergence(**given, reduction="none", chunk=4), 20)
    _, backward = products(lambda: torch.autograd.grad(loss.sum(), (given["hidden"], given["weight"]))[0], 20)
    assert len(backward) > 1
    assert forward == backward


@KIND
@pytest.mark.parametrize("options", [{"chunk": 4}, {"budget": 9 * 30 * 4}], ids=["chunk", "budget"])
def test_the_backward_pass_of_a_frozen_head_only_scales_what_the_forward_pass_computed(
    options: dict[str, Any], kind: Any, device: torch.device
) -> None:
    given, target, upstream = heads(device), torch.randint(30, (9,), device=device), torch.randn(9, device=device)
    target[2], upstream[2], hidden = -100, torch.inf, given["hidden"]
    more = {"kind": kind, "target": target, "hard_weight": 0.2, "reduction": "none", **options}
    expected = torch.autograd.grad(linear_divergence(**given, **more), hidden, upstream)[0]
    loss = linear_divergence(**{**given, "weight": given["weight"].detach()}, **more)
    for width in (20, 30):
        gradient, found = products(lambda: torch.autograd.grad(loss, hidden, upstream, retain_graph=True)[0], width)
        assert not found
        torch.testing.assert_close(gradient, expected)
    # The graph is freed: the gradient overwrites the derivative.
    torch.testing.assert_close(torch.autograd.grad(loss, hidden, upstream)[0], expected)


@pytest.mark.parametrize("options", [{}, {"chunk": 4}], ids=["kept", "recomputed"])
def test_main_grad_of_float16_gets_what_weight_would(
    options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks of classes, the last one short.
    monkeypatch.setattr("liger_core.ops.head.gradients.SCALED", 7 * 20)
    given, upstream = heads(device, torch.float16), 1e-6 * torch.randn(9, device=device)
    loss = linear_divergence(**given, reduction="none", **options)
    (expected,) = torch.autograd.grad(loss, given["weight"], 1e6 * upstream)
    main_grad = torch.zeros(30, 20, device=device)
    linear_divergence(**given, reduction="none", main_grad=main_grad, **options).backward(upstream)
    assert given["weight"].grad is None
    torch.testing.assert_close(1e6 * main_grad, expected.float(), rtol=1e-2, atol=1e-3)


@torch.no_grad()
def test_a_teacher_may_want_a_gradient_where_gradients_are_off(device: torch.device) -> None:
    given = heads(device)
    given["teacher_weight"].requires_grad_()
    assert linear_divergence(**given).isfinite()


@REDUCTION
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "recomputed"])
def test_what_is_held_beyond_gradients_fits_the_budget(
    reduction: Any, kept: bool, measured_device: torch.device
) -> None:
    hidden, weight = (leaf(rows, WIDTH, device=measured_device) for rows in (ROWS, CLASSES))
    teacher = torch.randn_like(hidden), torch.randn_like(weight)
    budget = LOGITS + LOGITS // 2 + (1 << 20) if kept else LOGITS // 4 + (2 << 20)
    gradients = (ROWS + CLASSES) * WIDTH * 4

    def step() -> Any:
        loss = linear_divergence(hidden, weight, *teacher, kind="jsd", reduction=reduction, budget=budget)
        return torch.autograd.grad(loss.sum(), (hidden, weight))

    # The reference holds blocks of its own besides.
    passes = 0 if measured_device.type == "cuda" else 26 * 4 * REFERENCE_BLOCK
    assert allocations(step, measured_device).peak <= budget + gradients + passes + (1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "recomputed"])
def test_main_grad_takes_no_second_gradient_of_weight(
    kept: bool, dtype: torch.dtype, measured_device: torch.device
) -> None:
    # A head that is larger than the logits of its rows. On the CPU the gradient of hidden in float16 would have the
    # head in float32.
    rows, width, classes = 16, 2048, 3000
    given = {
        "hidden": torch.randn(rows, width, device=measured_device).to(dtype),
        "weight": leaf(classes, width, device=measured_device, dtype=dtype),
        "teacher_hidden": torch.randn(rows, 32, device=measured_device),
        "teacher_weight": torch.randn(classes, 32, device=measured_device),
    }
    main_grad = torch.zeros(classes, width, device=measured_device)
    options = {} if kept else {"chunk": 8}
    loss = linear_divergence(**given, reduction="none", main_grad=main_grad, **options).sum()
    found = allocations(lambda: loss.backward(), measured_device)
    # In float16 there is a block of it.
    assert found.largest < main_grad.nbytes
    assert main_grad.any()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_of_logits_agree_with_the_generalized_jsd_of_trl(beta: float, device: torch.device) -> None:
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="TRL with GKD is not installed").GKDTrainer
    student, teacher = leaf(2, 5, 30, device=device), torch.randn(2, 5, 30, device=device)
    labels = torch.randint(30, (2, 5), device=device)
    labels[0, :2] = -100
    theirs = trainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=1.5)
    of_logits = {0.0: kl_div, 1.0: partial(kl_div, reverse=True)}.get(beta, partial(jsd, beta=beta))
    ours = of_logits(student, teacher, temperature=1.5, reduction="none")[labels != -100].mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, student), torch.autograd.grad(theirs, student))
