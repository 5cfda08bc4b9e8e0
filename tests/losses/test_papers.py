# SPDX-License-Identifier: Apache-2.0
"""Every loss and its gradient are those of its paper, from log-probabilities and from a Head."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from liger_core.losses import Head, pairs, surrogates
from losses import papers
from losses.cases import CASES, Case, Given

EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
SMALL = 1e-3
PRECISE, ROUNDED = {"rtol": 1e-9, "atol": 1e-12}, {"rtol": 2e-5, "atol": 2e-6}


def log_probs(answers: int, tokens: int) -> Tensor:
    return -2.0 * torch.rand(answers, tokens, dtype=torch.float64) - 0.02


def some(tokens: int) -> Tensor:
    """A mask that leaves holes at the start, at the end and between, and at least one token of each answer."""
    mask = torch.rand(4, tokens) < 0.7
    mask[:, tokens // 2] = True
    return mask


def given(policy: Tensor, mask: Tensor, difference: Callable[[], Tensor]) -> Given:
    """Other policies are off by `difference`; nobody may read what stands at tokens that do not count."""
    old = policy + difference()
    tensors = {
        "policy": policy,
        "reference": policy + difference(),
        "old": old,
        "sampling": old + 0.5 * difference(),
        "entropy": torch.rand_like(policy),
        "advantages": torch.randn_like(policy),
    }
    unread = {name: torch.where(mask, x, torch.nan) for name, x in tensors.items()}
    advantage = torch.tensor([1.3, -0.7, -1.1, 0.4], dtype=policy.dtype)
    return Given(mask=mask, advantage=advantage, desirable=torch.tensor([True, False, False, True]), **unread)


def random_batch() -> Given:
    policy = log_probs(4, 7)
    return given(policy, some(7), lambda: 0.5 * torch.randn_like(policy))


def one_token_batch() -> Given:
    policy = log_probs(4, 1)
    return given(policy, torch.ones(4, 1, dtype=torch.bool), lambda: 0.5 * torch.randn_like(policy))


def long_batch() -> Given:
    policy = log_probs(4, 4000)
    return given(policy, some(4000), lambda: 0.01 * torch.randn_like(policy))


def batch_of_hundreds() -> Given:
    """Every log-ratio of a token is 100 or −100."""
    policy = log_probs(4, 7)
    return given(policy, some(7), lambda: 100.0 * torch.randint(2, policy.shape).mul(2).sub(1).to(policy))


BATCHES = pytest.mark.parametrize(
    "batch",
    [random_batch, one_token_batch, long_batch, batch_of_hundreds],
    ids=["random", "one_token", "long", "hundreds"],
)


def in_dtype(batch: Given, dtype: torch.dtype) -> Given:
    """The batch as a caller has it; what the paper gets are the rounded values."""
    return replace(batch, **{name: x.to(dtype) for name, x in vars(batch).items() if x.is_floating_point()})


def on(batch: Given, device: torch.device) -> Given:
    return Given(**{name: x.to(device) for name, x in vars(batch).items()})


def from_tensors(case: Case, batch: Given) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of log-probabilities, and of entropies where they are part of the loss."""
    leaves = {"policy": batch.policy.clone().requires_grad_()}
    if case.entropy:
        leaves["entropy"] = batch.entropy.clone().requires_grad_()
    loss, _ = case.ours(tuple(leaves.values()) if case.entropy else leaves["policy"], batch, mask=batch.mask)
    return loss, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def from_paper(case: Case, batch: Given) -> tuple[Tensor, dict[str, Tensor]]:
    names = ["policy", "entropy"] if case.entropy else ["policy"]
    leaves = {name: getattr(batch, name).double().requires_grad_() for name in names}
    loss = case.paper(replace(batch, **leaves))
    return loss, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def assert_equal(
    got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]], rtol: float, atol: float
) -> None:
    """Gradients within atol of the largest one of their tensor; where all have vanished, a sigmoid rounds them as if
    they were SMALL."""
    torch.testing.assert_close(got[0].double().cpu(), want[0], rtol=rtol, atol=atol)
    for name, expected in want[1].items():
        largest = max(float(expected.abs().max()), SMALL)
        torch.testing.assert_close(
            got[1][name].double().cpu(), expected, rtol=rtol, atol=atol * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
@EACH
@BATCHES
def test_a_loss_in_float64_is_the_formula_of_its_paper(case: Case, batch: Callable[[], Given]) -> None:
    drawn = batch()
    assert_equal(from_tensors(case, drawn), from_paper(case, drawn), **PRECISE)


@pytest.mark.slow
@EACH
@BATCHES
def test_a_loss_in_float32_is_the_formula_of_its_paper(
    case: Case, batch: Callable[[], Given], device: torch.device
) -> None:
    drawn = in_dtype(batch(), torch.float32)
    loss, gradients = from_paper(case, drawn)
    if float(loss.detach().abs()) > 0.01 * torch.finfo(torch.float32).max:
        pytest.skip("the formula, or a sum on the way to it, is above the range of float32")
    assert_equal(from_tensors(case, on(drawn, device)), (loss, gradients), **ROUNDED)


@EACH
def test_a_loss_of_bfloat16_is_that_of_the_same_values_in_float32(case: Case) -> None:
    rounded = in_dtype(random_batch(), torch.bfloat16)
    loss, gradients = from_tensors(case, rounded)
    expected, wide = from_tensors(case, in_dtype(rounded, torch.float32))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wide[name].bfloat16(), rtol=0, atol=0)


@EACH
def test_without_a_counted_token_the_loss_is_zero_and_so_are_the_gradients(case: Case) -> None:
    batch = random_batch()
    loss, gradients = from_tensors(case, replace(batch, mask=torch.zeros_like(batch.mask)))
    assert float(loss.detach()) == 0.0
    assert [bool(g.any()) for g in gradients.values()] == [False] * len(gradients)


def head_batch() -> tuple[Given, dict[str, Tensor], Tensor]:
    """A batch whose policy is a head with the vocabulary of 20, with hidden states, weight and bias, and its targets."""
    batch = random_batch()
    leaves = {"hidden": torch.randn(4, 7, 8), "weight": torch.randn(20, 8), "bias": torch.randn(20)}
    target = torch.where(batch.mask, torch.randint(20, (4, 7)), -100)
    every = torch.log_softmax(leaves["hidden"] @ leaves["weight"].t() + leaves["bias"], -1)
    policy = every.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    noise = {
        name: policy.double() + 0.5 * torch.randn(4, 7, dtype=torch.float64)
        for name in ("reference", "old", "sampling")
    }
    return in_dtype(replace(batch, policy=policy.double(), **noise), torch.float32), leaves, target


@EACH
def test_a_loss_of_a_head_is_the_formula_of_its_paper(case: Case, device: torch.device) -> None:
    batch, leaves, target = head_batch()
    ours = {name: x.to(device, copy=True).requires_grad_() for name, x in leaves.items()}
    loss, _ = case.ours(Head(ours["hidden"], ours["weight"], target.to(device), bias=ours["bias"]), on(batch, device))
    got = loss, dict(zip(ours, torch.autograd.grad(loss, list(ours.values())), strict=True))

    exact = {name: x.double().requires_grad_() for name, x in leaves.items()}
    every = torch.log_softmax(exact["hidden"] @ exact["weight"].t() + exact["bias"], -1)
    policy = every.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    expected = case.paper(replace(batch, policy=policy, entropy=-(every.exp() * every).sum(-1)))
    want = expected, dict(zip(exact, torch.autograd.grad(expected, list(exact.values())), strict=True))
    assert_equal(got, want, rtol=2e-4, atol=2e-5)


def test_the_papers_have_every_variant_of_dpo_and_the_cases_every_one_of_grpo() -> None:
    assert papers.PAIRS.keys() == pairs.VARIANTS.keys()
    assert {f"grpo_{name}" for name in surrogates.VARIANTS} <= {case.name for case in CASES}
