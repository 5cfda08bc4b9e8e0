# SPDX-License-Identifier: Apache-2.0
"""What a training on the CPU really takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from liger_bench.train.run import run
from liger_bench.train.setup import Setup

CPU = torch.device("cpu")


def tiny(**changes: object) -> Setup:
    """A short training of two layers on the CPU."""
    return Setup("tiny", **({"batch": 2, "sequence": 64, "device": "cpu", "precision": "fp32", "checkpoint": "none", "steps": 1} | changes))


def measured_bytes(setup: Setup) -> int:
    """The peak of the second step, in which the optimizer has its state."""
    row = run(replace(setup, steps=2, data=str(Path(__file__).parent)))
    assert row.peak_bytes is not None, row.reason
    return row.peak_bytes
