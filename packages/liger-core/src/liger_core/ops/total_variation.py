# SPDX-License-Identifier: Apache-2.0
"""total_variation: how far a student's softmax is from a teacher's, by half the sum of the differences."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from liger_core.kernels import Kernel, reference_kernel
from liger_core.op import op
from liger_core.ops._divergence import (
    TORCH_DIVERGENCES,
    DivergenceOptions,
    DivergencePasses,
    check_logits,
    logit_divergences,
    logit_misuses,
    logit_samples,
    logit_work,
    logit_workloads,
)
from liger_core.ops._softmax_loss import Reduction


def check(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
) -> None:
    check_logits("total_variation", student, teacher, temperature, reduction, normalizer)


# No return annotation, so that its signature is that of the op.
def implementation(  # type: ignore[no-untyped-def]
    passes: DivergencePasses, make_kernel: Callable[..., Kernel], supported: Callable[..., None] | None = None
):
    """total_variation for a backend that brings the row passes; `supported(student, teacher)` may decline a call."""
    divergence = logit_divergences(passes, make_kernel)

    def total_variation(
        student: Tensor,
        teacher: Tensor,
        *,
        temperature: float = 1.0,
        reduction: Reduction = "mean",
        normalizer: Tensor | float | None = None,
    ) -> Tensor:
        """Total variation distance between the softmax of two rows of logits, p of the teacher and q of the student.

            total_variation = ½ Σ |p - q|

        student          (..., V)   any floating dtype; not overwritten, and not copied to float32 at once
        teacher          (..., V)   any floating dtype; gets no gradient
        temperature      divides the logits of both sides; the result is not multiplied by its square
        reduction        "mean" divides the sum by the number of rows (0 if there is none), or by normalizer
        normalizer       number or scalar tensor on the device, for instance the tokens of all accumulation steps
        returns          float32 (float64 for float64): a scalar, or (...) for "none"

        Log-probabilities are logits whose log-sum-exp is 0, so they can be passed as well.
        Where p = q for a class, the slope of |p - q| counts as 0. Classes at -inf on both sides count for nothing.
        Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
        Wen et al. 2023, arXiv:2307.15190 (f-DISTILL).
        """
        if supported is not None:
            supported(student, teacher)
        options = DivergenceOptions.given("total_variation", 0.5, temperature)
        return divergence(student, teacher, options, reduction, normalizer)

    return total_variation


total_variation = op(
    check=check,
    samples=logit_samples,
    misuses=lambda device: logit_misuses("total_variation", device),
    workloads=logit_workloads,
    work=logit_work,
)(implementation(TORCH_DIVERGENCES, reference_kernel))
