# SPDX-License-Identifier: Apache-2.0
"""The models that are trained by name: the presets that every command knows."""

from __future__ import annotations

from liger_hf.presets import PRESETS as SHAPES
from liger_hf.presets import preset as shape

__all__ = ["SHAPES", "shape"]
