# SPDX-License-Identifier: Apache-2.0
"""Other libraries that implement the ops, for comparison: one file each, all optional, imported on demand.

A file has `peers()`, a list of `Peer`, and if it may not run also `unavailable(device)`, the reason or None.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_core import Unsupported

# Name on the command line → file.
NAMES = ("eager", "separate", "torch", "compile", "liger-kernel", "cut-cross-entropy", "quack", "trl")
FILES = {name: name.replace("-", "_") for name in NAMES} | {"torch": "torch_fused", "compile": "torch_compile"}


@dataclass(frozen=True)
class Peer:
    """One implementation of some ops.

    calls       op name → a function of the op's arguments by name; it lacks those that the library has no option for
    overwrites  op name → the arguments that a forward or backward pass writes to; "gradients" stands for the upstream
                gradients
    consumes    whether a backward pass can run only once per forward pass
    prepared    a transformation of a function of `calls` before it is measured on a workload
    """

    name: str
    calls: Mapping[str, Callable[..., Any]]
    overwrites: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    consumes: bool = False
    prepared: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


def unavailable(name: str, device: torch.device) -> str | None:
    """Return the reason why a peer cannot run on the device, or None."""
    check = getattr(_file(name), "unavailable", None)
    return None if check is None else check(device)


def peers(name: str) -> list[Peer]:
    """Return the variants of a peer."""
    return _file(name).peers()


def teacher_share(kind: str, beta: float) -> float:
    """Return the mixture weight by which peers name a divergence: 0 is the forward KL, 1 the reverse KL, else a JSD."""
    share = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": beta}.get(kind)
    if share is None:
        raise Unsupported("it has the forward and the reverse KL and the JSD only")
    return share


def with_one_target(hidden: Tensor, target: Tensor) -> None:
    """Raise Unsupported for several targets per token."""
    if target.dim() == hidden.dim():
        raise Unsupported("it has one target per token only")


def by_name(*calls: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return a table of functions that have the names of their ops."""
    return {call.__name__: call for call in calls}


def missing(module: str, distribution: str) -> str | None:
    """Return the reason if a module is not installed, else None."""
    return None if importlib.util.find_spec(module) else f"it is not installed; pip install {distribution}"


def _file(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{FILES[name]}")
