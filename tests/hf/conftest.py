# SPDX-License-Identifier: Apache-2.0
"""The reference backend for every test of model patching."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from liger_core import use


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    with use("reference"):
        yield
