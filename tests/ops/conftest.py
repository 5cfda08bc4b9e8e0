# SPDX-License-Identifier: Apache-2.0
"""Selects the backend under test for every fact in this folder."""

import os
from collections.abc import Iterator

import pytest
import torch

from liger_core import use


@pytest.fixture(autouse=True)
def chosen_backend(pytestconfig: pytest.Config) -> Iterator[str]:
    """--backend for the length of a test, else the automatic choice."""
    name = pytestconfig.getoption("--backend") or "auto"
    with use(name):
        yield name


@pytest.fixture
def measured_device(device: torch.device, chosen_backend: str) -> torch.device:
    """The device, where what a call allocates is what its implementation allocates."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("an interpreter allocates for itself, and takes minutes for tensors whose size shows")
    return device
