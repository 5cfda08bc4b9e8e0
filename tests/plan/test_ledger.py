# SPDX-License-Identifier: Apache-2.0
"""The books of a step: what is born, what dies, and what it is for."""

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
    books = Ledger()
    with FakeTensorMode(), books:
        first = floats(KiB)
        books.doing = "most"
        second = floats(2 * KiB)
        del first
        books.doing = "after"
        third = floats(512)
    assert (books.peak().total, books.peak().doing) == (12 * KiB, "most")
    assert books.end().total == second.nbytes + third.nbytes


def test_views_and_in_place_operations_hold_nothing() -> None:
    books = Ledger()
    with FakeTensorMode(), books:
        x = floats(KiB)
        x.view(2, -1).t().mul_(2.0)
    assert books.peak().total == 4 * KiB


def test_sizes_are_those_of_cuda_blocks() -> None:
    books = Ledger()
    with FakeTensorMode(), books:
        kept = floats(1)
    assert books.peak().total == 512
    assert kept.nbytes == 4


def test_a_label_that_comes_late_holds_from_the_beginning() -> None:
    books = Ledger()
    with FakeTensorMode(), books:
        x = floats(KiB)
        y = floats(KiB)
        books.note(y, GRADIENTS)
    assert books.peak().held == {OTHER: 4 * KiB, GRADIENTS: 4 * KiB}
    assert x.shape == y.shape


def test_what_an_operation_holds_inside_counts_while_it_runs() -> None:
    books = Ledger(scratch=lambda func, args, kwargs: 8 * KiB if func is torch.ops.aten.mul.Tensor else 0)
    with FakeTensorMode(), books:
        x = floats(KiB)
        y = x * x
    assert books.peak().total == 16 * KiB
    assert books.end().total == x.nbytes + y.nbytes


def test_what_moves_away_is_held_no_longer() -> None:
    books = Ledger()
    with FakeTensorMode(), books:
        x = floats(KiB)
        books.note(x, WEIGHTS)
        books.move(x, 3 * KiB)
        books.begin()
        del x
    assert (books.static, books.end().total) == (KiB, 0)


def test_the_books_agree_with_torchs_own_tracker() -> None:
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    mode = FakeTensorMode()
    with mode:
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        x = torch.randn(512, 256)
    books, theirs = Ledger(), tracker.MemTracker()
    theirs.track_external(model, x)
    for watch in (books, theirs):
        model.zero_grad()
        with mode, watch:
            for tensor in (*model.parameters(), x) if watch is books else ():
                books.note(tensor)
            model(x).square().sum().backward()
    assert books.peak().total == pytest.approx(theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], rel=0.001)
