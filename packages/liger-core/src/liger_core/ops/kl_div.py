# SPDX-License-Identifier: Apache-2.0
"""kl_div: how far a student's softmax is from a teacher's, by the Kullback-Leibler divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.kernels import Kernel, reference_kernel
from liger_core.op import Misuse, Sample, op
from liger_core.ops._divergence import (
    TORCH_DIVERGENCES,
    DivergenceOptions,
    DivergencePasses,
    check_logits,
    check_mixture,
    logit_divergences,
    logit_misuses,
    logit_samples,
    logit_work,
    logit_workloads,
)
from liger_core.ops._inputs import misuses_of, normal
from liger_core.ops._softmax_loss import Reduction


def check(
    student: Tensor,
    teacher: Tensor,
    *,
    reverse: bool = False,
    skew: float = 0.0,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
) -> None:
    check_logits("kl_div", student, teacher, temperature, reduction, normalizer)
    checks.choice("kl_div", "reverse", reverse, (False, True))
    if skew != 0.0:
        check_mixture("kl_div", "skew", skew)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from logit_samples(device, dtype)

    def n(*shape: int) -> Tensor:
        return normal(device, dtype, *shape)

    for name, options, why in (
        ("reverse", {"reverse": True}, "the student comes first"),
        (
            "reverse_none",
            {"reverse": True, "reduction": "none", "temperature": 0.5},
            "the gradient needs the divergence of its row",
        ),
        ("skewed", {"skew": 0.1}, "the second side is a mixture"),
        ("skewed_reverse", {"skew": 0.8, "reverse": True}, "the mixture of the reverse divergence"),
    ):
        yield Sample(name, (n(5, 101), n(5, 101)), options, why=why, frozen=("teacher",))


def misuses(device: torch.device) -> Iterator[Misuse]:
    yield from logit_misuses("kl_div", device)
    misuse, x = misuses_of("kl_div"), torch.zeros(3, 8, device=device)
    yield misuse("skew", (x, x), OptionError, "skew must be a number in (0, 1), got 1.0", skew=1.0)
    yield misuse("skew_negative", (x, x), OptionError, "skew must be a finite number in [0, 1], got -0.1", skew=-0.1)
    yield misuse("reverse", (x, x), OptionError, "reverse must be one of False, True, got 'yes'", reverse="yes")


def _options(reverse: bool, skew: float, temperature: float) -> DivergenceOptions:
    """The mixture is named by the teacher's share of it."""
    if skew == 0.0:
        return DivergenceOptions.given("reverse_kl" if reverse else "forward_kl", 0.5, temperature)
    if reverse:
        return DivergenceOptions.given("skewed_reverse_kl", 1.0 - skew, temperature)
    return DivergenceOptions.given("skewed_kl", skew, temperature)


# No return annotation, so that its signature is that of the op.
def implementation(  # type: ignore[no-untyped-def]
    passes: DivergencePasses, make_kernel: Callable[..., Kernel], supported: Callable[..., None] | None = None
):
    """kl_div for a backend that brings the row passes; `supported(student, teacher)` may decline a call."""
    divergence = logit_divergences(passes, make_kernel)

    def kl_div(
        student: Tensor,
        teacher: Tensor,
        *,
        reverse: bool = False,
        skew: float = 0.0,
        temperature: float = 1.0,
        reduction: Reduction = "mean",
        normalizer: Tensor | float | None = None,
    ) -> Tensor:
        """Kullback-Leibler divergence between the softmax of two rows of logits, p of the teacher and q of the student.

            KL(p ‖ q) = Σ p · (log p - log q)          with reverse=True KL(q ‖ p)

        student          (..., V)   any floating dtype; not overwritten, and not copied to float32 at once
        teacher          (..., V)   any floating dtype; gets no gradient
        reverse          KL(q ‖ p), by which the student seeks a mode of the teacher rather than covering all of it
        skew             share of the first that is mixed into the second: KL(p ‖ skew · p + (1 - skew) · q), which is
                         always finite
        temperature      divides the logits of both sides; the result is not multiplied by its square
        reduction        "mean" divides the sum by the number of rows (0 if there is none), or by normalizer
        normalizer       number or scalar tensor on the device, for instance the tokens of all accumulation steps
        returns          float32 (float64 for float64): a scalar, or (...) for "none"

        Log-probabilities are logits whose log-sum-exp is 0, so they can be passed as well.
        Infinite where the second of the two gives a class probability 0 (a logit of -inf) and the first does not.
        Classes at -inf on both sides count for nothing. Terms of rows that are nearly equal do not cancel. Raises
        ShapeError, DtypeError, OptionError for arguments that do not fit. Kullback & Leibler 1951; skew: Ko et al.
        2024, arXiv:2402.03898 (DistiLLM).
        """
        if supported is not None:
            supported(student, teacher)
        options = _options(reverse, skew, temperature)
        return divergence(student, teacher, options, reduction, normalizer)

    return kl_div


kl_div = op(check=check, samples=samples, misuses=misuses, workloads=logit_workloads, work=logit_work)(
    implementation(TORCH_DIVERGENCES, reference_kernel)
)
