# SPDX-License-Identifier: Apache-2.0
"""Shares of a matrix of tests: CI takes one, and all of them together are the matrix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from conftest import pytest_collection_modifyitems as take

CASES = [f"test_a.py::test_op[{case}]" for case in "abcdefgh"]


def items(matrix: bool) -> list[Any]:
    return [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda _: object() if matrix else None)
        for name in [*CASES, "test_a.py::test_b"]
    ]


def share(number: str, matrix: bool = True) -> list[str]:
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    chosen = items(matrix)
    take(SimpleNamespace(getoption=lambda name: number, hook=hook), chosen)
    return [item.nodeid for item in chosen]


def test_the_shares_are_the_matrix() -> None:
    parts = [share(f"{number}/3") for number in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted([*CASES, "test_a.py::test_b"])
    assert max(map(len, parts)) - min(map(len, parts)) <= 2


def test_without_a_share_every_case_runs() -> None:
    assert share("1/1") == [*CASES, "test_a.py::test_b"]


def test_tests_outside_a_matrix_always_run() -> None:
    assert share("2/3", matrix=False) == [*CASES, "test_a.py::test_b"]


def test_a_share_is_one_of_the_cases_that_k_selects() -> None:
    """-k selects in a hook of the same name, which comes before one that is last."""
    assert take.pytest_impl["trylast"]  # type: ignore[attr-defined]
