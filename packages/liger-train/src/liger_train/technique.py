# SPDX-License-Identifier: Apache-2.0
"""The description of a technique, for `liger train`, `liger plan`, the tests and the documentation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from liger_train.setup import Setup


@dataclass(frozen=True)
class Technique:
    """One value of one option of `liger train`.

    summary        what the technique does, in one sentence
    saves, costs   one phrase each, for `liger plan` and the documentation
    packages       libraries that must be installed; an extra of liger-train has them
    by             libraries that implement it, if not `packages` or torch
    reason         why it needs a GPU; empty if it also runs on the CPU
    arguments      returns the fields of transformers.TrainingArguments that it sets
    problem        returns why it cannot be combined with a setup, as the end of an error message; empty if it can
    option, value  a field of Setup, and its value as on the command line
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
