# SPDX-License-Identifier: Apache-2.0
"""Whether the installed versions are tested ones: those that the metadata of Liger's packages allows."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement

# The libraries whose insides Liger depends on; newer versions of the others do not need a warning.
DEPENDED_ON = {"liger-core": "torch", "liger-triton": "triton", "liger-hf": "transformers"}


def complaint(distribution: str) -> str | None:
    """A sentence if the library that a package of Liger depends on is not of a tested version, else None."""
    name = DEPENDED_ON[distribution]
    try:
        version = metadata.version(name)
        required = [Requirement(line) for line in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:
        return None
    for requirement in required:
        # Of an extra, or for another platform.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name == name and not requirement.specifier.contains(version, prereleases=True):
            return f"Liger is tested with {name}{requirement.specifier}, got {version}"
    return None


@cache
def warn_if_untested(distribution: str, stacklevel: int = 1) -> None:
    """Once in a process, at the caller, or as many calls above it as `stacklevel` says."""
    said = complaint(distribution)
    if said:
        warnings.warn(f"{said}; install a tested version, or compare a few steps with and without Liger", stacklevel=stacklevel + 1)


def complaints() -> list[str]:
    """Those of all packages."""
    return [said for said in map(complaint, DEPENDED_ON) if said]
