# SPDX-License-Identifier: Apache-2.0
"""Selects the backend under test for every fact in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from liger_core import use


@pytest.fixture(autouse=True)
def chosen_backend(pytestconfig: pytest.Config) -> Iterator[str]:
    """--backend for the length of a test, else the automatic choice."""
    name = pytestconfig.getoption("--backend") or "auto"
    with use(name):
        yield name
