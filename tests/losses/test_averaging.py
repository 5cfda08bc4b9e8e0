# SPDX-License-Identifier: Apache-2.0
"""The averaging rules: what they count, and that parts of a batch add up."""

from typing import Any

import pytest
import torch

from liger_core.losses import Averaging, OffPolicy, Penalty, dft, dpo, grpo, kto
from losses.test_papers import random_batch

RULES = {
    "token": {"over": "token"},
    "sequence": {"over": "sequence"},
    "group": {"over": "group", "group_size": 2},
    "constant": {"over": "constant", "length": 9},
}
EACH = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@EACH
@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
def test_micro_batches_with_the_count_of_all_add_up_to_the_whole(rule: dict[str, object], on_device: bool) -> None:
    batch = random_batch()
    whole = {"token": batch.mask.sum().item(), "sequence": 4, "group": 2, "constant": 4}[str(rule["over"])]
    averaging = Averaging(**rule, count=torch.tensor(whole) if on_device else whole)

    def loss(rows: slice, averaging: Averaging) -> torch.Tensor:
        given = (x[rows] for x in (batch.policy, batch.old, batch.advantage))
        return grpo(*given, mask=batch.mask[rows], averaging=averaging)[0]

    parts = loss(slice(0, 2), averaging) + loss(slice(2, 4), averaging)
    torch.testing.assert_close(parts, loss(slice(0, 4), Averaging(**rule)))


@EACH
def test_the_mean_of_ones_is_one_and_of_an_empty_batch_zero(rule: dict[str, object]) -> None:
    for answers, mean in ((4, 1.0), (0, 0.0)):
        averaged = Averaging(**rule)(torch.ones(answers, 9), torch.ones(answers, 9, dtype=torch.bool))
        assert float(averaged) == pytest.approx(mean)


@pytest.mark.parametrize("convert", [float, torch.tensor], ids=["number", "tensor"])
def test_a_count_may_be_a_share_of_one_or_zero(convert: Any) -> None:
    ones, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    assert float(Averaging("sequence", count=convert(0.5))(ones, mask)) == 2.0
    assert float(Averaging("token", count=convert(0))(ones, ~mask)) == 0.0


def test_an_answer_without_tokens_still_counts_as_an_answer() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    assert float(Averaging("sequence")(torch.ones(2, 2), mask)) == 0.5


def test_pairs_of_padding_change_nothing() -> None:
    batch = random_batch()
    rows = [0, 1, 0, 2, 3, 0]
    padded = batch.mask[rows].clone()
    padded[[2, 5]] = False
    more = dpo(batch.policy[rows], batch.reference[rows], mask=padded)
    plain = dpo(batch.policy, batch.reference, mask=batch.mask)
    torch.testing.assert_close(*((loss, metrics.accuracy, metrics.margin) for loss, metrics in (more, plain)))


def test_single_answers_of_padding_change_nothing() -> None:
    batch = random_batch()
    rows = [0, 1, 2, 3, 0]
    padded = batch.mask[rows].clone()
    padded[4] = False
    more = kto(batch.policy[rows], batch.reference[rows], batch.desirable[rows], mask=padded)
    plain = kto(batch.policy, batch.reference, batch.desirable, mask=batch.mask)
    torch.testing.assert_close(more, plain)


def test_without_averaging_a_policy_loss_and_its_metrics_are_those_of_each_token() -> None:
    batch = random_batch()
    policy = batch.policy.requires_grad_()
    penalty, off_policy = Penalty(batch.reference, beta=0.3, entropy=0.1), OffPolicy(batch.sampling, threshold=0.05)
    given = (policy, batch.entropy), batch.old, batch.advantage
    options: Any = {"mask": batch.mask, "penalty": penalty, "off_policy": off_policy}
    each, metrics = grpo(*given, averaging=Averaging("none"), **options)
    assert {tuple(x.shape) for x in (each, *metrics)} == {(4, 7)}
    assert not bool(each[~batch.mask].any())
    assert {bool(x[~batch.mask].any()) for x in metrics} == {False}
    for over in ("token", "sequence"):
        loss, means = grpo(*given, averaging=Averaging(over), **options)
        torch.testing.assert_close(Averaging(over)(each, batch.mask), loss)
    for name, values, mean in zip(metrics._fields[1:], metrics[1:], means[1:], strict=True):
        torch.testing.assert_close(values.sum() / batch.mask.sum(), mean, msg=name)


def test_without_averaging_dft_is_that_of_each_token() -> None:
    batch = random_batch()
    each, metrics = dft(batch.policy, mask=batch.mask, averaging=Averaging("none"))
    p = batch.policy.exp()
    for value, expected in ((each, -p * batch.policy), (metrics.nll, -batch.policy), (metrics.probability, p)):
        torch.testing.assert_close(value, torch.where(batch.mask, expected, 0.0))
