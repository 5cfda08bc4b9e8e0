# SPDX-License-Identifier: Apache-2.0
"""The form in which a technique is described, once, for `liger train`, `liger plan`, the tests and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from liger_train.setup import Setup

Arguments = Callable[[Setup], Mapping[str, Any]]


Problem = Callable[[Setup], str]


def _nothing(setup: Setup) -> Mapping[str, Any]:
    return {}


def _none(setup: Setup) -> str:
    return ""


@dataclass(frozen=True)
class Technique:
    """One value of one option of `liger train`.

    option, value  field of Setup and what it is set to, as on the command line
    summary        one sentence: what it does
    saves, costs   one phrase each, for `liger plan` and the documentation
    carried_by     the libraries that do it; `packages` of them are looked for before a training starts
    extra          liger-train[extra] installs them
    devices        where it runs; `reason` says why not elsewhere
    arguments      what it adds to transformers.TrainingArguments
    problem        what must hold besides, came, and can be done, if the rest of a setup rules it out; else empty
    """

    option: str
    value: str
    summary: str
    saves: str
    costs: str
    carried_by: str
    packages: tuple[str, ...] = ()
    extra: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    reason: str = ""
    arguments: Arguments = _nothing
    problem: Problem = _none
