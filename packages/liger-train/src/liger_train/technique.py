# SPDX-License-Identifier: Apache-2.0
"""How a technique is described, once, for `liger train`, `liger plan`, the tests and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from liger_train.setup import Setup


@dataclass(frozen=True)
class Technique:
    """One value of one option of `liger train`.

    option, value  field of Setup and what it is set to, as on the command line
    summary        what it does, in one sentence
    saves, costs   one phrase each, for `liger plan` and the documentation
    implemented_by  the libraries that do it; those in `packages` must be installed, and are in an extra of liger-train
    devices        where it is supported; `reason` says why not elsewhere
    arguments      what it adds to transformers.TrainingArguments
    problem        why it cannot be combined with the rest of a setup, as the rest of an error; empty if it can
    """

    option: str
    value: str
    summary: str
    saves: str
    costs: str
    implemented_by: str
    packages: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    reason: str = ""
    arguments: Callable[[Setup], Mapping[str, Any]] = lambda setup: {}
    problem: Callable[[Setup], str] = lambda setup: ""
