# SPDX-License-Identifier: Apache-2.0
"""One warning where Transformers has a version that liger-hf was not tested with."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import metadata

import transformers
from packaging.requirements import Requirement


@cache
def warn_if_untested() -> None:
    """Once in a process. The tested versions are those that the metadata of liger-hf allows."""
    try:
        required = [Requirement(line) for line in metadata.requires("liger-hf") or ()]
    except metadata.PackageNotFoundError:
        return
    for requirement in required:
        if requirement.name == "transformers" and not requirement.specifier.contains(transformers.__version__, prereleases=True):
            warnings.warn(
                f"liger_hf: Liger is tested with transformers{requirement.specifier}, got {transformers.__version__}; install a tested "
                "version, or compare the losses of a few steps with and without Liger",
                stacklevel=4,
            )
