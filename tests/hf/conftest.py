# SPDX-License-Identifier: Apache-2.0
"""The reference backend for every test of model patching."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState

from liger_core import use


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    with use("reference"):
        yield


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps the precision of a process in a class; it is forgotten before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
