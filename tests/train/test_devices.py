# SPDX-License-Identifier: Apache-2.0
"""The device of a run: whose settings of the allocator hold."""

from __future__ import annotations

from typing import Any

import pytest

from liger_train.runs import devices
from liger_train.setup import Setup


@pytest.mark.parametrize(
    ("changes", "environment", "expected"),
    [
        ({}, {}, ["expandable_segments:True"]),
        ({"compile": "graphs"}, {}, []),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, []),
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, []),
    ],
)
def test_segments_of_the_allocator_grow_unless_somebody_configures_it(
    changes: dict[str, Any], environment: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(devices, "set_allocator_settings", said.append)
    for name in devices.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    devices._expand_segments(Setup("tiny", **changes))
    assert said == expected
