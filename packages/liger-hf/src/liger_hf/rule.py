# SPDX-License-Identifier: Apache-2.0
"""A rule that replaces one kind of module by an op, its findings in a module, and the candidates to replace it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_core import Op
from liger_core.errors import PluginError, nearest
from liger_hf.patch import Patch
from liger_hf.stand_in import Case

Dtypes = Iterable[torch.dtype]


@dataclass(frozen=True)
class Candidate:
    """One way to compute a module with an op.

    function  the function to check; it replaces the module's forward, or a function that the forward calls
    install   returns the patches for one instance, which are not installed yet
    covers    ops of other rules that it also puts into the module
    onto      turns an earlier rule's patch into one that also does what this candidate does, or returns None
    """

    op: Op[..., Any]
    detail: str
    function: Callable[..., Any]
    install: Callable[[nn.Module], Sequence[Patch]]
    covers: tuple[Op[..., Any], ...] = ()
    onto: Callable[[Patch], Patch | None] | None = None


@dataclass(frozen=True)
class Found:
    """A module that a rule applies to: its candidates and how to check them, or why it is left unchanged.

    kind      what distinguishes it from other modules of the rule; all of one kind share a check
    device    where the module computes, by default where the model's first weight is
    dtype     the dtype of its weights
    fallback  whether to ignore the module if an earlier rule replaces it
    """

    op: str
    kind: tuple[Any, ...] = ()
    refusal: str | None = None
    original: Callable[..., Any] | None = None
    candidates: Callable[[], Iterable[Candidate]] = tuple
    cases: Callable[[torch.device, Dtypes], Iterator[Case]] | None = None
    device: Callable[[], torch.device] | None = None
    dtype: torch.dtype = torch.float32
    fallback: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule that finds the modules that an op can replace; `liger_rules()` of a plugin returns a list of rules.

    look        returns its findings on a module, or None if the rule does not apply to it
    ops         the names of the ops that it can put in
    nothing     what the report says if only= names an op of the rule and it applied to no module
    on_request  whether the rule is used only if only= names one of its ops
    """

    name: str
    look: Callable[[nn.Module], Found | None]
    ops: tuple[str, ...]
    nothing: str
    on_request: bool = False

    def check(self, known: Iterable[str]) -> None:
        """Raise PluginError for an unknown op."""
        for op in self.ops:
            if op not in known:
                raise PluginError(
                    f"rule {self.name!r}: each of its ops must be a known op, got {op!r}; known: "
                    f"{', '.join(sorted(known))}.{nearest(op, known)}"
                )
