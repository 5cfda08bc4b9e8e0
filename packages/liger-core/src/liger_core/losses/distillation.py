# SPDX-License-Identifier: Apache-2.0
"""Distillation from data that a teacher can store or send: its most likely classes, or its hidden states."""

from typing import Literal

import torch
from torch import Tensor

from liger_core import checks
from liger_core.autograd import differentiable
from liger_core.errors import OptionError
from liger_core.kernels import Outputs, multiply, reference_kernel
from liger_core.op import accumulator
from liger_core.ops import jsd, kl_div, total_variation

TopKKind = Literal["forward_kl", "reverse_kl", "jsd", "total_variation"]


def topk_distillation(
    log_prob: Tensor, teacher_log_prob: Tensor, *, kind: TopKKind = "forward_kl", beta: float = 0.5, tail: bool = True
) -> Tensor:
    """Compute each row's divergence over the K classes that a teacher gives and one bucket for all others.

        p = (e^teacher_log_prob, 1 - Σ e^teacher_log_prob),   q = (e^log_prob, 1 - Σ e^log_prob)

        forward_kl       KL(p ‖ q)
        reverse_kl       KL(q ‖ p)
        jsd              beta · KL(p ‖ M) + (1 - beta) · KL(q ‖ M), with M = beta · p + (1 - beta) · q
        total_variation  ½ Σ |p - q|

    log_prob          (..., K)   of the student at the teacher's classes, from linear_log_prob with targets (..., K)
    teacher_log_prob  (..., K)   of the teacher, without a gradient; -inf where a row has fewer than K classes (if it
                      has none, the loss with the bucket is 0)
    kind              one of the four above
    beta              for "jsd", the teacher's share of M, in (0, 1)
    tail              whether there is a bucket; without it, both sides are normalized to the K classes. A bucket below
                      one rounding of 1, as when the K classes have all the mass, counts as one, without a gradient
    returns           (...), float32 (float64 for float64)

    The classes may also be the student's own, from top_classes. With the bucket, this is a lower bound of the
    divergence over all classes:

        log_prob = linear_log_prob(hidden, weight, top_classes)
        loss = topk_distillation(log_prob, top_log_prob)[mask].mean()

    Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
    Hinton et al. 2015, arXiv:1503.02531.
    """
    name = "topk_distillation"
    checks.floating(name, 2, log_prob=log_prob, teacher_log_prob=teacher_log_prob)
    checks.at_least_one_dimension(name, "log_prob", log_prob)
    if teacher_log_prob.shape != log_prob.shape or log_prob.shape[-1] == 0:
        sentence = f"teacher_log_prob must have shape (..., K) like log_prob {checks.shape(log_prob)}"
        checks.misshapen(name, sentence, teacher_log_prob)
    checks.constant(name, teacher_log_prob=teacher_log_prob)
    checks.choice(name, "kind", kind, ("forward_kl", "reverse_kl", "jsd", "total_variation"))
    dtype = accumulator(log_prob.dtype)
    teacher = teacher_log_prob.to(dtype)
    student = torch.where(teacher > -torch.inf, log_prob.to(dtype), -torch.inf)
    if tail:
        student, teacher = (torch.cat((side, _log_tail(side)), -1) for side in (student, teacher))
    # Log-probabilities are logits, which these ops normalize.
    loss: Tensor
    if kind == "jsd":
        loss = jsd(student, teacher, beta=beta, reduction="none")
    elif kind == "total_variation":
        loss = total_variation(student, teacher, reduction="none")
    else:
        loss = kl_div(student, teacher, reverse=kind == "reverse_kl", reduction="none")
    return loss


def _log_tail(log_prob: Tensor) -> Tensor:
    """Return log(1 - Σ e^log_prob); the sum may be 1, or slightly more because of rounding."""
    mass = log_prob.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(log_prob.dtype).eps)
    # Each branch gets only the values for which it is exact, and so does its gradient.
    small = mass < -0.6931471805599453
    rest = torch.where(small, mass, -1.0).exp().neg().log1p()
    return torch.where(small, rest, torch.where(small, -1.0, mass).expm1().neg().log())


def cosine_distillation(
    hidden: Tensor, teacher: Tensor, *, weight: Tensor | None = None, teacher_weight: Tensor | None = None
) -> Tensor:
    """Compute one minus the cosine of the angle between each token's hidden states, or logits, of student and teacher.

        loss = 1 - cos(hidden, teacher) = ½ |hidden/|hidden| - teacher/|teacher||²

    hidden          (..., H)   any floating dtype
    teacher         (..., H)   projected to the same width if necessary; gets no gradient
    weight          (V, H)     with both weights, the cosine is that of the logits hidden @ weightᵀ and
    teacher_weight  (V, Hₜ)    teacher @ teacher_weightᵀ, which are never computed; teacher is (..., Hₜ)
    returns         (...), float32 (float64 for float64)

    The second form keeps all digits if the angle is small. A row of zeros on either side has loss 1 and no gradient.
    The products of logits come from weightᵀ @ weight and weightᵀ @ teacher_weight, which take V · H · (H + Hₜ) products
    for any number of tokens. In float32, the loss of logits is exact to about 1e-6.
    Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
    Sanh et al. 2019, arXiv:1910.01108 (DistilBERT).
    """
    name = "cosine_distillation"
    checks.floating(name, 2, hidden=hidden, teacher=teacher, weight=weight, teacher_weight=teacher_weight)
    checks.at_least_one_dimension(name, "hidden", hidden)
    checks.constant(name, teacher=teacher, teacher_weight=teacher_weight)
    if weight is not None and teacher_weight is not None:
        _check_heads(name, hidden, teacher, weight, teacher_weight)
        return _cosine_of_logits(hidden, teacher, weight, teacher_weight.to(weight.dtype))
    if weight is not None or teacher_weight is not None:
        checks.fail(OptionError, name, "weight and teacher_weight must be given together, got one of them")
    if teacher.shape != hidden.shape:
        sentence = f"teacher must have shape {checks.shape(hidden)} like hidden"
        checks.misshapen(name, sentence, teacher, "; project one of them")
    dtype = accumulator(hidden.dtype)
    sides = [side.to(dtype) for side in (hidden, teacher)]
    norms = [torch.linalg.vector_norm(side, dim=-1, keepdim=True) for side in sides]
    nonzero = ((norms[0] > 0) & (norms[1] > 0))[..., 0]
    student, other = (side / torch.where(norm > 0, norm, 1.0) for side, norm in zip(sides, norms, strict=True))
    return torch.where(nonzero, 0.5 * (student - other).square().sum(-1), 1.0)


def _check_heads(name: str, hidden: Tensor, teacher: Tensor, weight: Tensor, teacher_weight: Tensor) -> None:
    classes = weight.shape[0] if weight.dim() == 2 else "V"
    for label, head, side in (("weight", weight, hidden), ("teacher_weight", teacher_weight, teacher)):
        if head.dim() != 2 or head.shape != (classes, side.shape[-1]):
            checks.misshapen(name, f"{label} must have shape ({classes}, {side.shape[-1]})", head)
    if teacher.shape[:-1] != hidden.shape[:-1]:
        checks.misshapen(name, f"teacher must have the rows of hidden {checks.shape(hidden)}", teacher)


def _cosine_of_logits(hidden: Tensor, teacher: Tensor, weight: Tensor, teacher_weight: Tensor) -> Tensor:
    student, other = (side.to(accumulator(hidden.dtype)) for side in (hidden, teacher))
    gram, mixed, their_gram = _head_products(weight, teacher_weight)
    norm, their_norm = ((student @ gram) * student).sum(-1), ((other @ their_gram) * other).sum(-1)
    nonzero = (norm > 0) & (their_norm > 0)
    scale = torch.where(nonzero, norm, 1.0).rsqrt() * torch.where(nonzero, their_norm, 1.0).rsqrt()
    return torch.where(nonzero, 1.0 - ((student @ mixed) * other).sum(-1) * scale, 1.0)


def _allocate(weight: Tensor, teacher_weight: Tensor) -> Outputs:
    dtype, pairs = accumulator(weight.dtype), ((weight, weight), (weight, teacher_weight), (teacher_weight,) * 2)
    return tuple(weight.new_empty(a.shape[1], b.shape[1], dtype=dtype) for a, b in pairs)


def _launch(gram: Tensor, mixed: Tensor, their_gram: Tensor, /, weight: Tensor, teacher_weight: Tensor) -> None:
    multiply(gram, weight.t(), weight)
    multiply(mixed, weight.t(), teacher_weight)
    multiply(their_gram, teacher_weight.t(), teacher_weight)


def _allocate_backward(
    grad_gram: Tensor, grad_mixed: Tensor, weight: Tensor, teacher_weight: Tensor, needs: list[bool]
) -> Outputs:
    return (torch.empty_like(weight, memory_format=torch.contiguous_format),)


def _launch_backward(
    grad_weight: Tensor, /, grad_gram: Tensor, grad_mixed: Tensor, weight: Tensor, teacher_weight: Tensor,
    needs: list[bool],
) -> None:  # fmt: skip
    multiply(grad_weight, weight, (grad_gram + grad_gram.t()).to(weight.dtype))
    multiply(grad_weight, teacher_weight, grad_mixed.t().to(weight.dtype), grad_weight)


# weightᵀ @ weight, weightᵀ @ teacher_weight and teacher_weightᵀ @ teacher_weight, in float32 (float64 for float64).
_head_products = differentiable(
    reference_kernel("head_products", _allocate, _launch),
    reference_kernel("head_products_backward", _allocate_backward, _launch_backward),
    saves=("weight", "teacher_weight"),
    public=3,
)
