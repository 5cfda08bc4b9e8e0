# SPDX-License-Identifier: Apache-2.0
"""total_variation: how far a student's softmax is from a teacher's, by half the sum of the differences."""

from torch import Tensor

from liger_core.ops._composed import Supported
from liger_core.ops._divergence import DivergenceOptions
from liger_core.ops._logit_divergence import LogitDivergences, Reduction, logit_divergence


@logit_divergence()
def total_variation(
    divergence: LogitDivergences, supported: Supported, student: Tensor, teacher: Tensor, *, temperature: float = 1.0,
    reduction: Reduction = "mean", normalizer: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    """Total variation distance between the softmax of two rows of logits, p of the teacher and q of the student.

        total_variation = ½ Σ |p - q|

    student          (..., V)   any floating dtype; not overwritten, and not copied to float32 at once
    teacher          (..., V)   any floating dtype; gets no gradient
    temperature      divides the logits of both sides; the result is not multiplied by its square
    reduction        "mean" divides the sum by the number of rows (0 if there is none), or by normalizer;
                     "classes" is the term of each class, whose sum over classes is the divergence of a row
    normalizer       number or scalar tensor on the device, for instance the tokens of all accumulation steps
    returns          float32 (float64 for float64): a scalar, (...) for "none", or (..., V) for "classes"

    Log-probabilities are logits whose log-sum-exp is 0, so they can be passed as well.
    Where p = q for a class, the slope of |p - q| counts as 0. Classes at -inf on both sides do not count.
    Raises ShapeError, DtypeError, OptionError for arguments that do not fit.
    Wen et al. 2023, arXiv:2307.15190 (f-DISTILL).
    """
    supported(student, teacher)
    options = DivergenceOptions.from_arguments("total_variation", 0.5, temperature)
    return divergence(student, teacher, options, reduction, normalizer)
