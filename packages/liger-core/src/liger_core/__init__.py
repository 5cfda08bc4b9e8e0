# SPDX-License-Identifier: Apache-2.0
"""Liger's ops: interfaces, pure-PyTorch references, and the choice of a backend for each."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from liger_core import builtin, plugins
from liger_core.backend import Backend, Implementation
from liger_core.errors import (
    BackendError,
    DeviceError,
    DtypeError,
    GradientError,
    LigerError,
    OptionError,
    PluginError,
    ShapeError,
    TargetError,
    Unsupported,
)
from liger_core.explanation import explain
from liger_core.hookspecs import hookimpl
from liger_core.op import Misuse, Op, Product, Sample, Work, Workload, op
from liger_core.ops import *  # noqa: F403
from liger_core.ops._softmax_loss import LossMetrics
from liger_core.ops.head.shards import VocabShard
from liger_core.ops.linear_log_prob import TokenStatistics
from liger_core.selection import use

if TYPE_CHECKING:
    from liger_core import losses, nn

__version__ = "0.1.0"

plugins.offer(builtin)


def __getattr__(name: str) -> ModuleType:
    """Import losses and modules on first use: most programs that import this package need none."""
    if name in ("losses", "nn"):
        return importlib.import_module(f"liger_core.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    *(op.name for op in builtin.CATALOGUE),
    "Backend",
    "BackendError",
    "DeviceError",
    "DtypeError",
    "GradientError",
    "Implementation",
    "LigerError",
    "LossMetrics",
    "Misuse",
    "Op",
    "OptionError",
    "PluginError",
    "Product",
    "Sample",
    "ShapeError",
    "TargetError",
    "TokenStatistics",
    "Unsupported",
    "VocabShard",
    "Work",
    "Workload",
    "explain",
    "hookimpl",
    "losses",
    "nn",
    "op",
    "use",
]
