# SPDX-License-Identifier: Apache-2.0
"""jsd: how far a student's softmax is from a teacher's, by the generalized Jensen-Shannon divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

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
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
) -> None:
    check_logits("jsd", student, teacher, temperature, reduction, normalizer)
    check_mixture("jsd", "beta", beta)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from logit_samples(device, dtype)

    def n(*shape: int) -> Tensor:
        return normal(device, dtype, *shape)

    yield Sample(
        "beta", (n(5, 101), n(5, 101)), {"beta": 0.1}, why="the student has most of the mixture", frozen=("teacher",)
    )
    options = {"beta": 0.9, "reduction": "none", "temperature": 0.5}
    yield Sample(
        "beta_none", (n(5, 101), n(5, 101)), options, why="the teacher has most of the mixture", frozen=("teacher",)
    )
    far, tiny = (n(5, 4), 30.0 * n(5, 4)), {"beta": 0.999}
    yield Sample(
        "beta_far", far, tiny, why="classes that only the student has, by a share of nearly 0", frozen=("teacher",)
    )
    student, teacher = n(4, 60), n(4, 60)
    student[:, 40:], teacher[:, :20] = -torch.inf, -torch.inf
    yield Sample(
        "impossible_classes", (student, teacher), why="a class that one side rules out is finite", frozen=("teacher",)
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    yield from logit_misuses("jsd", device)
    misuse, x = misuses_of("jsd"), torch.zeros(3, 8, device=device)
    yield misuse("beta", (x, x), OptionError, "beta must be a number in (0, 1), got 1.0", beta=1.0)
    yield misuse("beta_nan", (x, x), OptionError, "beta must be a finite number in [0, 1], got nan", beta=float("nan"))


# No return annotation, so that its signature is that of the op.
def implementation(  # type: ignore[no-untyped-def]
    passes: DivergencePasses, make_kernel: Callable[..., Kernel], supported: Callable[..., None] | None = None
):
    """jsd for a backend that brings the row passes; `supported(student, teacher)` may decline a call."""
    divergence = logit_divergences(passes, make_kernel)

    def jsd(
        student: Tensor,
        teacher: Tensor,
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: Reduction = "mean",
        normalizer: Tensor | float | None = None,
    ) -> Tensor:
        """Generalized Jensen-Shannon divergence between the softmax of two rows of logits, p of the teacher and q of
        the student.

            M   = beta · p + (1 - beta) · q
            jsd = beta · KL(p ‖ M) + (1 - beta) · KL(q ‖ M)

        student          (..., V)   any floating dtype; not overwritten, and not copied to float32 at once
        teacher          (..., V)   any floating dtype; gets no gradient
        beta             the teacher's share, in (0, 1). As in TRL and GKD; there 0 and 1 name the forward and the
                         reverse KL, which are not limits of the formula: call kl_div for these
        temperature      divides the logits of both sides; the result is not multiplied by its square
        reduction        "mean" divides the sum by the number of rows (0 if there is none), or by normalizer
        normalizer       number or scalar tensor on the device, for instance the tokens of all accumulation steps
        returns          float32 (float64 for float64): a scalar, or (...) for "none"

        Log-probabilities are logits whose log-sum-exp is 0, so they can be passed as well.
        Always finite. Classes at -inf on both sides count for nothing. Terms of rows that are nearly equal do not
        cancel. Raises ShapeError, DtypeError, OptionError for arguments that do not fit. Agarwal et al. 2023,
        arXiv:2306.13649 (GKD), equation 1.
        """
        if supported is not None:
            supported(student, teacher)
        options = DivergenceOptions.given("jsd", beta, temperature)
        return divergence(student, teacher, options, reduction, normalizer)

    return jsd


jsd = op(check=check, samples=samples, misuses=misuses, workloads=logit_workloads, work=logit_work)(
    implementation(TORCH_DIVERGENCES, reference_kernel)
)
