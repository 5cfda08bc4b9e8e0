# SPDX-License-Identifier: Apache-2.0
"""kl_div: how far a student's softmax is from a teacher's, by the Kullback-Leibler divergence."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.op import Misuse, Sample
from liger_core.ops._composed import Supported
from liger_core.ops._divergence import DivergenceOptions, Kind, check_mixture
from liger_core.ops._inputs import misuses_of
from liger_core.ops._logit_divergence import LogitDivergences, Reduction, logit_divergence, logit_pairs, logit_samples


def check(reverse: bool = False, skew: float = 0.0) -> None:
    checks.choice("kl_div", "reverse", reverse, (False, True))
    if skew != 0.0:
        check_mixture("kl_div", "skew", skew)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    pair = logit_pairs(device, dtype)
    none = {"reverse": True, "reduction": "none", "temperature": 0.5}
    yield from logit_samples(
        ("reverse", pair(5, 101), {"reverse": True}, "the student comes first"),
        ("reverse_none", pair(5, 101), none, "the gradient needs the divergence of its row"),
        ("skewed", pair(5, 101), {"skew": 0.1}, "the second side is a mixture"),
        ("skewed_reverse", pair(5, 101), {"skew": 0.8, "reverse": True}, "the mixture of the reverse divergence"),
    )


def misuses(device: torch.device) -> Iterator[Misuse]:
    misuse, x = misuses_of("kl_div"), torch.zeros(3, 8, device=device)
    yield misuse("skew", (x, x), OptionError, "skew must be a number in (0, 1), got 1.0", skew=1.0)
    yield misuse("skew_negative", (x, x), OptionError, "skew must be a finite number in [0, 1], got -0.1", skew=-0.1)
    yield misuse("reverse", (x, x), OptionError, "reverse must be one of False, True, got 'yes'", reverse="yes")


@logit_divergence(check, samples, misuses)
def kl_div(
    divergence: LogitDivergences, supported: Supported, student: Tensor, teacher: Tensor, *, reverse: bool = False,
    skew: float = 0.0, temperature: float = 1.0, reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
) -> Tensor:  # fmt: skip
    """Kullback-Leibler divergence between the softmax of two rows of logits, p of the teacher and q of the student.

        KL(p ‖ q) = Σ p · (log p - log q)          with reverse=True KL(q ‖ p)

    student          (..., V)   any floating dtype; not overwritten, and not copied to float32 at once
    teacher          (..., V)   any floating dtype; gets no gradient
    reverse          KL(q ‖ p), by which the student seeks a mode of the teacher rather than covering all of it
    skew             share of the first that is mixed into the second: KL(p ‖ skew · p + (1 - skew) · q), which is
                     always finite
    temperature      divides the logits of both sides; the result is not multiplied by its square
    reduction        "mean" divides the sum by the number of rows (0 if there is none), or by normalizer;
                     "classes" is the term of each class, whose sum over classes is the divergence of a row
    normalizer       number or scalar tensor on the device, for instance the tokens of all accumulation steps
    returns          float32 (float64 for float64): a scalar, (...) for "none", or (..., V) for "classes"

    Log-probabilities are logits whose log-sum-exp is 0, so they can be passed as well.
    Infinite where the second of the two gives a class probability 0 (a logit of -inf) and the first does not.
    Classes at -inf on both sides do not count. Terms of rows that are nearly equal do not cancel. Raises
    ShapeError, DtypeError, OptionError for arguments that do not fit. Kullback & Leibler 1951; skew: Ko et al.
    2024, arXiv:2402.03898 (DistiLLM).
    """
    supported(student, teacher)
    kind: Kind = "reverse_kl" if reverse else "forward_kl"
    if skew != 0.0:
        kind = "skewed_reverse_kl" if reverse else "skewed_kl"
    # The options take the teacher's share of the mixture.
    options = DivergenceOptions.from_arguments(kind, 1.0 - skew if reverse else skew, temperature)
    return divergence(student, teacher, options, reduction, normalizer)
