# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments, and the error message of each."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from liger_core import DtypeError, LigerError, OptionError, ShapeError, losses
from liger_core.losses import (
    Averaging,
    Clip,
    Head,
    Likelihood,
    OffPolicy,
    Penalty,
    Vespo,
    cpo,
    dpo,
    grpo,
    kto,
    orpo,
    ppo,
    simpo,
)

X = torch.full((4, 3), -1.0)
MASK = torch.ones(4, 3, dtype=torch.bool)
ODD, ODD_MASK = X[:3], MASK[:3]
GOOD = torch.tensor([True, False, True, False])
HEAD = Head(torch.randn(3, 2, 4), torch.randn(9, 4), torch.zeros(3, 2, dtype=torch.int64))

WRONG: dict[str, tuple[Callable[[], Any], type[LigerError], str]] = {
    "odd": (lambda: dpo(ODD, ODD, mask=ODD_MASK), ShapeError, "losses.dpo: policy must hold the chosen sequences, then as many rejected ones, got 3 sequences"),
    "odd_head": (lambda: orpo(HEAD), ShapeError, "losses.orpo: policy must hold the chosen sequences, then as many rejected ones, got 3 sequences"),
    "no_mask": (lambda: dpo(X, X), OptionError, "losses.dpo: mask must be given with log-probabilities: True for the tokens that count; only a Head has its own"),
    "float_mask": (lambda: dpo(X, X, mask=MASK.float()), DtypeError, "losses.dpo: mask must be bool or an integer, got torch.float32"),
    "mask_shape": (lambda: dpo(X, X, mask=MASK[:, :2]), ShapeError, "losses.dpo: mask must have the shape of policy (4, 3), got (4, 2)"),
    "head_mask_shape": (lambda: orpo(HEAD, mask=MASK), ShapeError, "losses.orpo: mask must have the shape of policy (3, 2), got (4, 3)"),
    "flat_policy": (lambda: cpo(X[0], mask=MASK[0]), ShapeError, "losses.cpo: policy must be (sequences, tokens), got (3,)"),
    "list": (lambda: cpo([1.0], mask=MASK), DtypeError, "losses.cpo: policy must be a tensor, got list"),
    "integers": (lambda: cpo(X.long(), mask=MASK), DtypeError, "losses.cpo: policy must have a floating dtype, got torch.int64"),
    "no_reference": (lambda: dpo(X, None, mask=MASK), DtypeError, "losses.dpo: reference must be a tensor, got NoneType"),
    "reference_shape": (lambda: dpo(X, X[:, :2], mask=MASK), ShapeError, "losses.dpo: reference must have the shape of policy (4, 3), got (4, 2)"),
    "sums_shape": (lambda: kto(X, X[:3, 0], GOOD, mask=MASK), ShapeError, "losses.kto: reference must be (sequences, tokens) or (sequences,) like policy (4, 3), got (3,)"),
    "baseline_shape": (lambda: kto(X, X, GOOD, mask=MASK, baseline=torch.zeros(4, 1)), ShapeError, "losses.kto: baseline must be one number for the whole batch, got a tensor of shape (4, 1)"),
    "baseline_nan": (lambda: kto(X, X, GOOD, mask=MASK, baseline=float("nan")), OptionError, "losses.kto: baseline must be a finite number, got nan"),
    "variant_shape": (lambda: dpo(X, X, mask=MASK, variant=lambda chosen, rejected, beta: (chosen - rejected)[:, None]), ShapeError, "losses.dpo: variant must return a loss of each pair, shape (2,), got shape (2, 1)"),
    "variant_number": (lambda: dpo(X, X, mask=MASK, variant=lambda chosen, rejected, beta: 1.0), ShapeError, "losses.dpo: variant must return a loss of each pair, shape (2,), got float"),
    "count_shape": (lambda: Averaging(count=torch.tensor([2.0, 3.0])), ShapeError, "losses.Averaging: count must be one number, got a tensor of shape (2,)"),
    "negative_count": (lambda: Averaging(count=-3), OptionError, "losses.Averaging: count must be a finite number ≥ 0, got -3"),
    "statistics": (lambda: Head(HEAD.hidden, HEAD.weight, HEAD.target, return_statistics=True), OptionError, "losses.Head: return_statistics must be False, since losses take log-probabilities and entropies, got True; call linear_log_prob for the rest"),
    "averaging": (lambda: grpo(X, X, X, mask=MASK, averaging="token"), OptionError, "losses.grpo: averaging must be of type Averaging, got 'token'"),
    "dft_averaging": (lambda: losses.dft(X, mask=MASK, averaging="token"), OptionError, "losses.dft: averaging must be of type Averaging, got 'token'"),
    "likelihood": (lambda: cpo(X, mask=MASK, likelihood=1), OptionError, "losses.cpo: likelihood must be of type Likelihood, got 1"),
    "likelihood_averaging": (lambda: Likelihood(averaging=1), OptionError, "losses.Likelihood: averaging must be of type Averaging, got 1"),
    "likelihood_of_each_token": (lambda: Likelihood(averaging=Averaging("none")), OptionError, "losses.Likelihood: averaging must reduce to one number, got over='none'"),
    "likelihood_weight": (lambda: Likelihood(-1.0), OptionError, "losses.Likelihood: weight must be a finite number ≥ 0, got -1.0"),
    "likelihood_mask": (lambda: orpo(X, mask=MASK, likelihood=Likelihood(policy=X[:2])), OptionError, "losses.Likelihood: mask must be given with log-probabilities: True for the tokens that count; only a Head has its own"),
    "kto_weights": (lambda: kto(X, X, GOOD, mask=MASK, weights=(1.0, -1.0)), OptionError, "losses.kto: weights must be a finite number ≥ 0, got -1.0"),
    "count_of_each_token": (lambda: Averaging("none", count=3), OptionError, "losses.Averaging: count must be None with over='none', got 3"),
    "penalty_level": (lambda: Penalty(X, level="word"), OptionError, "losses.Penalty: level must be one of 'token', 'sequence', got 'word'"),
    "penalty": (lambda: grpo(X, X, X, mask=MASK, penalty=0.04), OptionError, "losses.grpo: penalty must be of type Penalty, got 0.04"),
    "off_policy": (lambda: grpo(X, X, X, mask=MASK, off_policy=2), OptionError, "losses.grpo: off_policy must be of type OffPolicy, got 2"),
    "clip": (lambda: ppo(X, X, X, mask=MASK, clip=0.2), OptionError, "losses.ppo: clip must be of type Clip, got 0.2"),
    "no_clip": (lambda: ppo(X, X, X, mask=MASK, clip=0.0), OptionError, "losses.ppo: clip must be of type Clip, got 0.0"),
    "beta": (lambda: dpo(X, X, mask=MASK, beta=0.0), OptionError, "losses.dpo: beta must be a finite number > 0, got 0.0"),
    "variant": (lambda: dpo(X, X, mask=MASK, variant="ppo"), OptionError, "losses.dpo: variant must be one of 'sigmoid', 'robust', 'hinge', 'ipo', 'exo', 'nca', 'sppo', 'bco', 'apo-zero', 'apo-down', 'discopop', got 'ppo'"),
    "smoothing_elsewhere": (lambda: cpo(X, mask=MASK, variant="hinge", label_smoothing=0.1), OptionError, "losses.cpo: label_smoothing must be 0 with variant='hinge', got 0.1; sigmoid, robust, exo have it"),
    "smoothing_range": (lambda: simpo(X, mask=MASK, label_smoothing=1.5), OptionError, "losses.simpo: label_smoothing must be a finite number in [0, 1], got 1.5"),
    "robust": (lambda: dpo(X, X, mask=MASK, variant="robust", label_smoothing=0.5), OptionError, "losses.dpo: label_smoothing must be below 0.5 with variant='robust', got 0.5"),
    "exo": (lambda: dpo(X, X, mask=MASK, variant="exo"), OptionError, "losses.dpo: label_smoothing must be between 0 and 1 with variant='exo', got 0.0; the paper takes 1e-3"),
    "desirable": (lambda: kto(X, X, GOOD.long(), mask=MASK), DtypeError, "losses.kto: desirable must be bool, got torch.int64"),
    "desirable_shape": (lambda: kto(X, X, GOOD[:2], mask=MASK), ShapeError, "losses.kto: desirable must be (4,) to match policy (4, 3), got (2,)"),
    "grpo_variant": (lambda: grpo(X, X, X, mask=MASK, variant="bnpo"), OptionError, "losses.grpo: variant must be one of 'grpo', 'dr-grpo', 'dapo', 'gspo', 'luspo', 'cispo', 'sapo', 'vespo', got 'bnpo'"),
    "dr_grpo": (lambda: grpo(X, X, X, mask=MASK, variant="dr-grpo"), OptionError, 'losses.grpo: averaging must be Averaging("constant", length=…) with variant="dr-grpo", the longest answer that can be sampled, ' "got None"),
    "advantages": (lambda: ppo(X, X, X[:, :2], mask=MASK), ShapeError, "losses.ppo: advantages must be (4,) or (4, 3) to match policy, got (4, 2)"),
    "no_entropy": (lambda: grpo(X, X, X, mask=MASK, penalty=Penalty(entropy=0.1)), OptionError, "losses.grpo: policy must bring its entropy: pass a Head, or the pair that linear_log_prob(…, return_entropy=True) returns, got log-probabilities"),
    "vespo": (lambda: grpo(X, X, X, mask=MASK, variant=Vespo(), off_policy=OffPolicy(X)), OptionError, "losses.grpo: off_policy must have weight=None with vespo, which corrects by itself: pass the log-probabilities of the sampler as old"),
    "delta": (lambda: Clip(0.2, 0.3, delta=1.2), OptionError, "losses.Clip: delta must be above 1 + high = 1.3, got 1.2"),
    "level": (lambda: Clip(level="word"), OptionError, "losses.Clip: level must be one of 'token', 'sequence', got 'word'"),
    "estimator": (lambda: Penalty(X, estimator="k4"), OptionError, "losses.Penalty: estimator must be one of 'k1', 'k2', 'k3', got 'k4'"),
    "weight": (lambda: OffPolicy(X, weight="clip"), OptionError, "losses.OffPolicy: weight must be one of 'truncate', 'mask', None, got 'clip'"),
    "bounds": (lambda: OffPolicy(X, low=3.0), OptionError, "losses.OffPolicy: low must be below high=2.0, got 3.0"),
    "rule": (lambda: Averaging("batch"), OptionError, "losses.Averaging: over must be one of 'token', 'sequence', 'group', 'constant', 'none', got 'batch'"),
    "no_length": (lambda: Averaging("constant"), OptionError, "losses.Averaging: length must be given with over='constant', and only there, got None with over='constant'"),
    "group_size": (lambda: Averaging("token", group_size=2), OptionError, "losses.Averaging: group_size must be given with over='group', and only there, got 2 with over='token'"),
    "groups": (lambda: grpo(X, X, X, mask=MASK, averaging=Averaging("group", group_size=3)), ShapeError, "losses.Averaging: sequences must come in groups of group_size=3, got 4 sequences"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_named(wrong: tuple[Callable[[], Any], type[LigerError], str]) -> None:
    call, error, message = wrong
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_no_function_has_more_than_eight_parameters() -> None:
    import inspect

    names = [name for name in losses.__all__ if name != "Head" and not name.endswith("Metrics")]
    assert max(len(inspect.signature(getattr(losses, name)).parameters) for name in names) <= 8
