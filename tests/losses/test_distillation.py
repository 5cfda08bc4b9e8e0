# SPDX-License-Identifier: Apache-2.0
"""Facts about topk_distillation and cosine_distillation: their formulas in float64, full mass, padding, zeros."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core import OptionError, ShapeError, linear_log_prob
from liger_core.losses import cosine_distillation, topk_distillation
from ops.agreement import leaf
from ops.allocations import allocations

KIND = pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "total_variation"])
TAIL = pytest.mark.parametrize("tail", [True, False], ids=["tail", "no_tail"])


def some_log_probs(
    device: torch.device, scale: float = 1.0, k: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Of 6 rows and 40 classes, those of the teacher's k most likely ones on both sides."""
    student, teacher = (torch.randn(6, 40, dtype=torch.float64) * scale for _ in range(2))
    top = teacher.log_softmax(-1).topk(k, dim=-1)
    chosen = student.log_softmax(-1).gather(-1, top.indices)
    return chosen.to(device, dtype).requires_grad_(), top.values.to(device, dtype)


def transcription(log_prob: Tensor, teacher_log_prob: Tensor, kind: str, beta: float, tail: bool) -> Tensor:
    """The formulas of the docstring, bucket by bucket."""
    q, p = log_prob.exp(), teacher_log_prob.exp()
    if tail:
        q, p = (torch.cat((side, 1 - side.sum(-1, keepdim=True)), -1) for side in (q, p))
    else:
        q, p = (side / side.sum(-1, keepdim=True) for side in (q, p))
    mixture = beta * p + (1 - beta) * q

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return (first * (first / second).log()).sum(-1)

    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, mixture) + (1 - beta) * kl(q, mixture),
        "total_variation": lambda: 0.5 * (p - q).abs().sum(-1),
    }[kind]()


@KIND
@TAIL
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_topk_distillation_is_the_divergence_of_its_buckets(
    kind: Any, tail: bool, scale: float, device: torch.device
) -> None:
    student, teacher = some_log_probs(device, scale)
    exact_student = student.detach().double().requires_grad_()
    loss = topk_distillation(student, teacher, kind=kind, beta=0.3, tail=tail)
    exact = transcription(exact_student, teacher.double(), kind, 0.3, tail)
    upstream = torch.randn(6, device=device)
    (gradient,) = torch.autograd.grad(loss, student, upstream)
    (wanted,) = torch.autograd.grad(exact, exact_student, upstream.double())
    torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-5)


@KIND
def test_all_classes_give_the_divergence_of_the_whole_softmax(kind: Any, device: torch.device) -> None:
    student, teacher = some_log_probs(device, k=40)
    whole, buckets = (topk_distillation(student, teacher, kind=kind, tail=tail) for tail in (False, True))
    torch.testing.assert_close(buckets, whole, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(loss.sum(), student)[0] for loss in (buckets, whole)]
    assert gradients[0].isfinite().all()
    # The bucket takes part in the normalization with one rounding of 1.
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@KIND
@pytest.mark.parametrize("excess", [-1e-9, 0.0, 1e-6])
def test_a_mass_of_one_or_a_rounding_more_is_finite(kind: Any, excess: float, device: torch.device) -> None:
    sure = torch.tensor([[excess, -20.0, -30.0]], device=device)
    unsure = torch.full_like(sure, -1.2)
    for student, teacher in ((sure, sure.flip(-1)), (sure, unsure), (unsure, sure)):
        given = student.clone().requires_grad_()
        loss = topk_distillation(given, teacher, kind=kind)
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), given)[0].isfinite().all()


@KIND
@TAIL
def test_rows_may_have_fewer_classes(kind: Any, tail: bool, device: torch.device) -> None:
    student, teacher = some_log_probs(device)
    # As linear_log_prob gives it for ignored targets: 0.
    padded = F.pad(student, (0, 2)), F.pad(teacher, (0, 2), value=-torch.inf)
    plain = topk_distillation(student, teacher, kind=kind, tail=tail)
    torch.testing.assert_close(topk_distillation(*padded, kind=kind, tail=tail), plain)
    (gradient,) = torch.autograd.grad(topk_distillation(*padded, kind=kind, tail=tail).sum(), student)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), student)[0])


def test_a_row_without_any_class_has_neither_loss_nor_gradient(device: torch.device) -> None:
    student, teacher = some_log_probs(device)
    teacher[2] = -torch.inf
    loss = topk_distillation(student, teacher)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert loss[2] == 0
    assert not gradient[2].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@TAIL
def test_topk_distillation_agrees_with_the_server_distillation_of_trl(beta: float, tail: bool) -> None:
    trainer = "trl.experimental.server_distillation.server_distillation_trainer"
    trl = pytest.importorskip(trainer, reason="TRL cannot be imported")
    student, teacher = some_log_probs(torch.device("cpu"))
    sides, mask = [student, teacher], torch.ones(6, 8, dtype=torch.bool)
    if tail:
        sides, (mask, _) = zip(*(trl._add_tail_bucket(side, mask) for side in sides), strict=True)
    else:
        sides = [side - side.logsumexp(-1, keepdim=True) for side in sides]
    theirs = trl._jsd_divergence(*sides, beta, mask)
    theirs = theirs.sum(-1) if theirs.dim() == 2 else theirs
    kind: Any = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    ours = topk_distillation(student, teacher, kind=kind, tail=tail)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mixed_kl_weight", [1.0, 0.0, 0.3], ids=["forward", "reverse", "mixed"])
def test_log_probabilities_and_entropy_give_the_zero_outside_topk_of_nemo_rl(mixed_kl_weight: float) -> None:
    """The recipe of docs/how-to/distillation.md. The formula has all classes: the teacher's others at e⁻¹⁰⁰."""
    hidden, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 5, 12), (40, 12)))
    teacher_logits, classes = torch.randn(2, 5, 40, dtype=torch.float64).topk(6)
    (x, w), (exact_x, exact_w) = ([t.clone().requires_grad_() for t in (hidden, weight)] for _ in range(2))

    log_prob, entropy = linear_log_prob(x, w, classes, return_entropy=True)
    top = teacher_logits.log_softmax(-1)
    forward_kl = (top.exp() * (top - log_prob)).sum(-1)
    reverse_kl = 100 * (1 - log_prob.exp().sum(-1)) - entropy - (log_prob.exp() * top).sum(-1)
    loss = mixed_kl_weight * forward_kl + (1 - mixed_kl_weight) * reverse_kl

    student = (exact_x @ exact_w.mT).log_softmax(-1)
    teacher = torch.full_like(student, -100.0).scatter(-1, classes, top)
    among_top = student.gather(-1, classes)
    exact_reverse = (student.exp() * (student - teacher)).sum(-1)
    exact = mixed_kl_weight * (top.exp() * (top - among_top)).sum(-1) + (1 - mixed_kl_weight) * exact_reverse

    upstream = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (x, w), upstream), torch.autograd.grad(exact, (exact_x, exact_w), upstream)
    )


def test_topk_distillation_names_what_is_wrong(device: torch.device) -> None:
    student, teacher = some_log_probs(device)
    shape = r"teacher_log_prob must have shape \(\.\.\., K\) like log_prob \(6, 8\), got \(6, 7\)"
    with pytest.raises(ShapeError, match=shape):
        topk_distillation(student, teacher[:, 1:])
    with pytest.raises(OptionError, match=r"teacher_log_prob must not require a gradient"):
        topk_distillation(teacher, student)
    with pytest.raises(OptionError, match="kind must be one of"):
        topk_distillation(student, teacher, kind="kl")  # type: ignore[arg-type]


def test_cosine_distillation_is_one_minus_the_cosine(device: torch.device) -> None:
    hidden, teacher = leaf(3, 4, 20, device=device), torch.randn(3, 4, 20, device=device)
    upstream = torch.randn(3, 4, device=device)
    ours, plain = cosine_distillation(hidden, teacher), 1 - F.cosine_similarity(hidden, teacher, dim=-1)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(*(torch.autograd.grad(loss, hidden, upstream) for loss in (ours, plain)))


def test_a_small_angle_keeps_its_digits(device: torch.device) -> None:
    hidden = torch.randn(4, 64, device=device, dtype=torch.float64)
    near = (hidden + 1e-4 * torch.randn(4, 64, device=device, dtype=torch.float64)).float()
    exact = 1 - F.cosine_similarity(hidden.float().double(), near.double(), dim=-1)
    torch.testing.assert_close(cosine_distillation(hidden.float(), near).double(), exact, rtol=1e-2, atol=0)


@pytest.mark.parametrize("logits", [False, True], ids=["hidden_states", "logits"])
def test_hidden_states_and_logits_of_zeros_have_loss_one_and_no_gradient(logits: bool, device: torch.device) -> None:
    hidden, teacher = leaf(3, 8, device=device), torch.randn(3, 8, device=device)
    weight = torch.randn(20, 8, device=device) if logits else None
    teacher[1] = 0.0
    with torch.no_grad():
        hidden[0] = 0.0
    loss = cosine_distillation(hidden, teacher, weight=weight, teacher_weight=weight)
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert loss[:2].tolist() == [1.0, 1.0]
    assert not gradient[:2].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_cosine_of_logits_is_that_of_the_logits_which_it_does_not_hold(
    dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = (leaf(*shape, device=device, dtype=dtype) for shape in ((3, 5, 16), (400, 16)))
    teacher, teacher_weight = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((3, 5, 12), (400, 12)))
    upstream = torch.randn(3, 5, device=device)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    formula = 1 - F.cosine_similarity(exact[0] @ exact[1].t(), teacher.double() @ teacher_weight.double().t(), dim=-1)
    wanted = torch.autograd.grad(formula, exact, upstream.double())
    loss = cosine_distillation(hidden, teacher, weight=weight, teacher_weight=teacher_weight)
    gradients = torch.autograd.grad(loss, (hidden, weight), upstream.to(loss.dtype))
    rtol = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    torch.testing.assert_close(loss.double(), formula, rtol=rtol, atol=rtol)
    for ours, gradient in zip(gradients, wanted, strict=True):
        bound = (2e-2 if dtype == torch.bfloat16 else 10 * rtol) * float(gradient.abs().max())
        torch.testing.assert_close(ours.double(), gradient, rtol=0, atol=bound)


def test_the_cosine_of_logits_holds_no_logits() -> None:
    hidden, weight, teacher, other = (torch.randn(shape) for shape in ((64, 8), (96, 8), (64, 6), (96, 6)))
    hidden.requires_grad_()
    call = partial(cosine_distillation, hidden, teacher, weight=weight, teacher_weight=other)
    assert allocations(lambda: call().sum().backward(), torch.device("cpu")).largest <= 4 * 96 * 8


def test_cosine_distillation_names_what_is_wrong() -> None:
    x, weight = torch.randn(3, 8), torch.randn(20, 8)
    with pytest.raises(OptionError, match="weight and teacher_weight must be given together, got one of them"):
        cosine_distillation(x, x, weight=weight)
    with pytest.raises(ShapeError, match=r"teacher_weight must have shape \(20, 8\), got \(19, 8\)"):
        cosine_distillation(x, x, weight=weight, teacher_weight=weight[1:])
    with pytest.raises(ShapeError, match=r"teacher must have the rows of hidden \(3, 8\), got \(2, 8\)"):
        cosine_distillation(x, x[:2], weight=weight, teacher_weight=weight)
