# SPDX-License-Identifier: Apache-2.0
"""jsd: how far a student's softmax is from a teacher's, by the generalized Jensen-Shannon divergence."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core.errors import OptionError
from liger_core.op import Misuse, Sample
from liger_core.ops._composed import Supported
from liger_core.ops._divergence import DivergenceOptions, check_mixture
from liger_core.ops._inputs import misuses_of
from liger_core.ops._logit_divergence import LogitDivergences, Reduction, logit_divergence, logit_pairs, logit_samples


def check(beta: float = 0.5) -> None:
    check_mixture("jsd", "beta", beta)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    pair = logit_pairs(device, dtype)
    none = {"beta": 0.9, "reduction": "none", "temperature": 0.5}
    even, odd, (student, teacher), (mine, theirs) = pair(5, 101), pair(5, 101), pair(5, 4), pair(4, 60)
    mine[:, 40:], theirs[:, :20] = -torch.inf, -torch.inf
    yield from logit_samples(
        ("beta", even, {"beta": 0.1}, "the student has most of the mixture"),
        ("beta_none", odd, none, "the teacher has most of the mixture"),
        ("beta_far", (student, 30.0 * teacher), {"beta": 0.999}, "classes of the student alone, its share nearly 0"),
        ("impossible_classes", (mine, theirs), {}, "a class that one side rules out is finite"),
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse, x = misuses_of("jsd"), torch.zeros(3, 8, device=device)
    yield misuse("beta", (x, x), OptionError, "beta must be a number in (0, 1), got 1.0", beta=1.0)
    yield misuse("beta_nan", (x, x), OptionError, "beta must be a finite number in [0, 1], got nan", beta=float("nan"))


@logit_divergence(check, samples, misuses)
def jsd(
    divergence: LogitDivergences, supported: Supported, student: Tensor, teacher: Tensor, *, beta: float = 0.5,
    temperature: float = 1.0, reduction: Reduction = "mean", normalizer: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    """Generalized Jensen-Shannon divergence between the softmax of two rows of logits, p of the teacher and q of
    the student.

        M   = beta · p + (1 - beta) · q
        jsd = beta · KL(p ‖ M) + (1 - beta) · KL(q ‖ M)

    student          (..., V)   any floating dtype; not overwritten, and not copied to float32 at once
    teacher          (..., V)   any floating dtype; gets no gradient
    beta             the teacher's share, in (0, 1). As in TRL and GKD; there 0 and 1 name the forward and the
                     reverse KL, which are not limits of the formula: call kl_div for these
    temperature      divides the logits of both sides; the result is not multiplied by its square
    reduction        "mean" divides the sum by the number of rows (0 if there is none), or by normalizer;
                     "classes" is the term of each class, whose sum over classes is the divergence of a row
    normalizer       number or scalar tensor on the device, for instance the tokens of all accumulation steps
    returns          float32 (float64 for float64): a scalar, (...) for "none", or (..., V) for "classes"

    Log-probabilities are logits whose log-sum-exp is 0, so they can be passed as well.
    Always finite. Classes at -inf on both sides do not count. Terms of rows that are nearly equal do not
    cancel. Raises ShapeError, DtypeError, OptionError for arguments that do not fit. Agarwal et al. 2023,
    arXiv:2306.13649 (GKD), equation 1.
    """
    supported(student, teacher)
    options = DivergenceOptions.from_arguments("jsd", beta, temperature)
    return divergence(student, teacher, options, reduction, normalizer)
