# SPDX-License-Identifier: Apache-2.0
"""One warning where Transformers has a version that liger-hf was not tested with."""

from __future__ import annotations

import warnings
from functools import cache

import transformers

from liger_core.versions import complaint


@cache
def warn_if_untested() -> None:
    """Once in a process. The tested versions are those that the metadata of liger-hf allows."""
    said = complaint("liger-hf", transformers.__version__)
    if said:
        warnings.warn(
            f"liger_hf: {said}; install a tested version, or compare the losses of a few steps with and without Liger", stacklevel=4
        )
