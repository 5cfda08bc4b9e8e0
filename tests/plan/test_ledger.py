# SPDX-License-Identifier: Apache-2.0
"""The ledger of a step: allocations, releases, and their categories."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_train.plan.ledger import GRADIENTS, OTHER, WEIGHTS, Ledger

KiB = 1024


def floats(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32)


def test_the_peak_is_when_most_is_held() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        first = floats(KiB)
        ledger.doing = "most"
        second = floats(2 * KiB)
        del first
        ledger.doing = "after"
        third = floats(512)
    assert (ledger.peak().total, ledger.peak().doing) == (12 * KiB, "most")
    assert ledger.end().total == second.nbytes + third.nbytes


def test_views_and_in_place_operations_hold_nothing() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        x = floats(KiB)
        x.view(2, -1).t().mul_(2.0)
    assert ledger.peak().total == 4 * KiB


def test_sizes_are_those_of_cuda_blocks() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        kept = floats(1)
    assert ledger.peak().total == 512
    assert kept.nbytes == 4


def test_a_label_that_comes_late_holds_from_the_beginning() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        x = floats(KiB)
        y = floats(KiB)
        ledger.record(y, GRADIENTS)
    assert ledger.peak().held == {OTHER: 4 * KiB, GRADIENTS: 4 * KiB}
    assert x.shape == y.shape


def test_what_an_operation_holds_inside_counts_while_it_runs() -> None:
    ledger = Ledger(workspace=lambda func, args, kwargs: 8 * KiB if func is torch.ops.aten.mul.Tensor else 0)
    with FakeTensorMode(), ledger:
        x = floats(KiB)
        y = x * x
    assert ledger.peak().total == 16 * KiB
    assert ledger.end().total == x.nbytes + y.nbytes


def test_what_moves_away_is_held_no_longer() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        x = floats(KiB)
        ledger.record(x, WEIGHTS)
        ledger.move(x, 3 * KiB)
        ledger.begin()
        del x
    assert (ledger.static, ledger.end().total) == (KiB, 0)


def test_the_ledger_agrees_with_torchs_own_tracker() -> None:
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    mode = FakeTensorMode()
    with mode:
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        x = torch.randn(512, 256)
    ledger, theirs = Ledger(), tracker.MemTracker()
    theirs.track_external(model, x)
    for watch in (ledger, theirs):
        model.zero_grad()
        with mode, watch:
            for tensor in (*model.parameters(), x) if watch is ledger else ():
                ledger.record(tensor)
            model(x).square().sum().backward()
    assert ledger.peak().total == pytest.approx(
        theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], rel=0.001
    )
