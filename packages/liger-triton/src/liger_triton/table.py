# SPDX-License-Identifier: Apache-2.0
"""op → implementation: one line per op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import liger_core
from liger_core import Op
from liger_triton.add_rms_norm import add_rms_norm
from liger_triton.cross_entropy import cross_entropy
from liger_triton.geglu import geglu
from liger_triton.layer_norm import layer_norm
from liger_triton.linear_cross_entropy import linear_cross_entropy
from liger_triton.linear_log_prob import linear_log_prob
from liger_triton.rms_norm import rms_norm
from liger_triton.rope import rope
from liger_triton.swiglu import swiglu

TABLE: dict[Op[..., Any], Callable[..., Any]] = {
    liger_core.rms_norm: rms_norm,
    liger_core.add_rms_norm: add_rms_norm,
    liger_core.layer_norm: layer_norm,
    liger_core.rope: rope,
    liger_core.swiglu: swiglu,
    liger_core.geglu: geglu,
    liger_core.cross_entropy: cross_entropy,
    liger_core.linear_cross_entropy: linear_cross_entropy,
    liger_core.linear_log_prob: linear_log_prob,
}
