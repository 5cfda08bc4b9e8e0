# SPDX-License-Identifier: Apache-2.0
"""What goes to a constructor, and what to a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from liger_core.errors import OptionError, nearest


def arguments_of(module: nn.Module, names: tuple[str, ...], inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, be they passed by position or by name."""
    if len(inputs) > len(names):
        raise TypeError(f"{type(module).__name__}: the call must have at most {', '.join(names)}, got {len(inputs)} values")
    by_position = dict(zip(names, inputs, strict=False))
    for name in named:
        if name in by_position:
            raise TypeError(f"{type(module).__name__}: {name} must be given once, got it by position and by name")
    return by_position | named


def check_options(name: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for option in options:
        if option not in known:
            words = f"be among {', '.join(known)}" if known else "be none"
            raise OptionError(f"{name}: options must {words}, got {option!r}.{nearest(option, known)}")
