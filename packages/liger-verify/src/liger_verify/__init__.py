# SPDX-License-Identifier: Apache-2.0
"""Compare a parallel step with one process, packed documents with the same alone, and training with its sampler."""

from liger_verify.comparison import compare
from liger_verify.packing import PackingReport, compare_packing
from liger_verify.report import Difference, Report
from liger_verify.sampler import Sample, SamplerReport, compare_sampler
from liger_verify.world import Step, World

__version__ = "0.1.0"

__all__ = [
    "Difference",
    "PackingReport",
    "Report",
    "Sample",
    "SamplerReport",
    "Step",
    "World",
    "compare",
    "compare_packing",
    "compare_sampler",
]
