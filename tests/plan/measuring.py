# SPDX-License-Identifier: Apache-2.0
"""The measured memory of a run on the CPU."""

from dataclasses import replace
from pathlib import Path

import torch

from liger_train.runs.run import run
from liger_train.setup import Setup

CPU = torch.device("cpu")


def tiny(**changes: object) -> Setup:
    """A short run of two layers on the CPU."""
    options = {"batch": 2, "sequence": 64, "device": "cpu", "precision": "fp32", "checkpoint": "none", "steps": 1}
    return Setup("tiny", **(options | changes))


def measured_bytes(setup: Setup) -> int:
    """The peak of the second step, in which the optimizer has its state."""
    row = run(replace(setup, steps=2, data=str(Path(__file__).parent)))
    assert row.peak_bytes is not None, row.reason
    return row.peak_bytes
