# SPDX-License-Identifier: Apache-2.0
"""Shares of the tests: CI takes one, and all of them together are the suite."""

from types import SimpleNamespace
from typing import Any

from conftest import pytest_collection_modifyitems as take

# One file has slow tests only, one has quick tests, too.
SLOW = [f"test_a.py::test_op[{case}]" for case in "abcdefgh"]
AMONG_OTHERS = [f"test_b.py::test_op[{case}]" for case in "abcd"]
QUICK = "test_b.py::test_b"


def share(number: str) -> list[str]:
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    chosen: list[Any] = [
        SimpleNamespace(
            nodeid=name, get_closest_marker=lambda asked, name=name: (asked == "slow" and name != QUICK) or None
        )
        for name in [*SLOW, *AMONG_OTHERS, QUICK]
    ]
    take(SimpleNamespace(getoption=lambda name: number, hook=hook), chosen)
    return [item.nodeid for item in chosen]


def test_the_shares_are_all_tests_and_as_large_as_each_other() -> None:
    parts = [share(f"{number + 1}/3") for number in range(3)]
    assert sorted(name for part in parts for name in part if name != QUICK) == [*SLOW, *AMONG_OTHERS]
    assert all(QUICK in part for part in parts)
    for group in (SLOW, AMONG_OTHERS):
        sizes = [len({*group} & {*part}) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_every_share_has_a_test_of_each_file() -> None:
    parts = [share(f"{number + 1}/16") for number in range(16)]
    assert [len({*SLOW} & {*part}) for part in parts] == [1] * 16
    assert [len({*AMONG_OTHERS} & {*part}) for part in parts] == [1] * 4 + [0] * 12
    assert set().union(*parts) == {*SLOW, *AMONG_OTHERS, QUICK}


def test_without_a_share_every_test_runs() -> None:
    assert share("1/1") == [*SLOW, *AMONG_OTHERS, QUICK]


def test_a_share_is_one_of_the_tests_that_k_selects() -> None:
    """-k selects in a hook of the same name, which comes before one that is last."""
    assert take.pytest_impl["trylast"]  # type: ignore[attr-defined]
