# SPDX-License-Identifier: Apache-2.0
"""Shares of the tests: CI takes one, and all of them together are the suite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conftest import pytest_collection_modifyitems as take

CASES = [f"test_a.py::test_op[{case}]" for case in "abcdefgh"]
OTHER = "test_a.py::test_b"


def share(number: str, marker: str = "matrix") -> list[str]:
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    chosen: list[Any] = [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda asked: asked == marker or None)
        for name in [*CASES, OTHER]
    ]
    take(SimpleNamespace(getoption=lambda name: number, hook=hook), chosen)
    return [item.nodeid for item in chosen]


@pytest.mark.parametrize("marker", ["matrix", "slow"])
def test_the_shares_are_all_tests(marker: str) -> None:
    parts = [share(f"{number + 1}/3", marker) for number in range(3)]
    assert set().union(*parts) == {*CASES, OTHER}
    assert sorted(name for part in parts for name in part if name in CASES) == CASES
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_share_has_a_slow_test_of_each_file() -> None:
    parts = [share(f"{number + 1}/16", "slow") for number in range(16)]
    assert [len(part) for part in parts] == [1] * 16
    assert parts[:9] + parts[:7] == parts


def test_a_share_has_a_case_of_a_matrix_that_has_fewer_cases_than_there_are_shares() -> None:
    parts = [share(f"{number + 1}/16") for number in range(16)]
    assert [len(set(CASES) & set(part)) for part in parts] == [1] * 16
    assert all(OTHER in part for part in parts)


def test_without_a_share_or_a_mark_every_case_runs() -> None:
    assert share("1/1") == share("1/1", "slow") == share("2/3", "cpu") == [*CASES, OTHER]


def test_a_share_is_one_of_the_cases_that_k_selects() -> None:
    """-k selects in a hook of the same name, which comes before one that is last."""
    assert take.pytest_impl["trylast"]  # type: ignore[attr-defined]
