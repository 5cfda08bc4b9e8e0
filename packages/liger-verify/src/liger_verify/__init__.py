# SPDX-License-Identifier: Apache-2.0
"""Compare a parallel training step with one process in float64."""

from __future__ import annotations

from liger_verify.comparison import compare
from liger_verify.report import Difference, Report
from liger_verify.world import Step, World

__version__ = "0.1.0"

__all__ = ["Difference", "Report", "Step", "World", "compare"]
