# SPDX-License-Identifier: Apache-2.0
"""Checks of installed versions: tested are those that the metadata of Liger's packages allows."""

import warnings
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement

# The libraries whose insides Liger depends on; newer versions of the others do not need a warning.
DEPENDED_ON = {"liger-core": "torch", "liger-triton": "triton", "liger-hf": "transformers"}


def complaint(distribution: str) -> str | None:
    """Return a sentence if the version of a library that Liger depends on is untested, else None."""
    name = DEPENDED_ON[distribution]
    try:
        version = metadata.version(name)
        required = [Requirement(line) for line in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:
        return None
    for requirement in required:
        # Skip requirements of an extra or another platform.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name == name and not requirement.specifier.contains(version, prereleases=True):
            return f"Liger is tested with {name}{requirement.specifier}, got {version}"
    return None


@cache
def warn_if_untested(distribution: str, stacklevel: int = 1) -> None:
    """Warn once if the installed version of a library is untested; a `stacklevel` of 1 points to the caller."""
    message = complaint(distribution)
    if message:
        warnings.warn(
            f"{message}; install a tested version, or compare a few steps with and without Liger",
            stacklevel=stacklevel + 1,
        )


def complaints() -> list[str]:
    """Return a sentence for each library whose version is untested."""
    return [said for said in map(complaint, DEPENDED_ON) if said]
