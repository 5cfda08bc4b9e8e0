# SPDX-License-Identifier: Apache-2.0
"""Where the models of a test are made, and which backend runs them."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from hf import tiny_models
from liger_core import use


@pytest.fixture(autouse=True)
def place(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """On the CPU the reference computes; on another device, unless the test is marked `cpu`, what a user gets.
    --backend overrides both."""
    here = torch.device("cpu") if request.node.get_closest_marker("cpu") else device
    monkeypatch.setattr(tiny_models, "DEVICE", here)
    backend = request.config.getoption("--backend") or ("reference" if here.type == "cpu" else None)
    with use(backend) if backend else nullcontext():
        yield here
