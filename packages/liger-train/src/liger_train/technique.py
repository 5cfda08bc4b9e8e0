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

    summary        what it does, in one sentence
    saves, costs   one phrase each, for `liger plan` and the documentation
    packages       the libraries that must be installed, which are in an extra of liger-train
    by             the libraries that do it, if they are not `packages` or torch
    reason         why it is supported on GPUs only; empty if it runs on the CPU, too
    arguments      what it adds to transformers.TrainingArguments
    problem        why it cannot be combined with the rest of a setup, as the rest of an error; empty if it can
    option, value  field of Setup and what it is set to, as on the command line
    """

    summary: str
    saves: str = "nothing"
    costs: str = "nothing"
    packages: tuple[str, ...] = ()
    by: str = ""
    reason: str = ""
    arguments: Callable[[Setup], Mapping[str, Any]] = lambda setup: {}
    problem: Callable[[Setup], str] = lambda setup: ""
    option: str = ""
    value: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        return ("cuda",) if self.reason else ("cpu", "cuda")

    @property
    def implemented_by(self) -> str:
        return self.by or ", ".join(self.packages) or "torch"
