# SPDX-License-Identifier: Apache-2.0
"""What every module shares: it keeps the arguments of its constructor, checks them once, and shows them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_core.errors import DtypeError, OptionError


class Module(nn.Module):
    """A module whose `repr` has the arguments of its constructor.

    arguments  of the constructor by name, without device and dtype; tensors among them are buffers instead
    """

    arguments: dict[str, Any]

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def extra_repr(self) -> str:
        """What is required, and options that are not the default; eps always, as the norms of torch show it."""
        known, given = inspect.signature(type(self)).parameters, {**self.arguments, **self._buffers}
        shown = []
        # A subclass with a constructor of its own may not have all of them.
        for name in [*(name for name in known if name in given), *(name for name in given if name not in known)]:
            value, default = given[name], known[name].default if name in known else Ellipsis
            if default is inspect.Parameter.empty:
                shown.append(_short(value))
            elif name == "eps" or isinstance(value, Tensor) or value != default:
                shown.append(f"{name}={_short(value)}")
        return ", ".join(shown)


def _short(value: Any) -> str:
    """A tensor with several values by its shape."""
    return f"Tensor{tuple(value.shape)}" if isinstance(value, Tensor) and value.dim() else repr(value)


def check_size(module: nn.Module, **sizes: Any) -> None:
    """Widths and counts."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(f"{type(module).__name__}: {name} must be an integer ≥ 1, got {value!r}")


def check_switches(module: nn.Module, **switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise OptionError(f"{type(module).__name__}: {name} must be True or False, got {_short(value)}")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory, for a check."""
    return torch.empty(shape, dtype=dtype, device="meta")


def check_options(check: Callable[..., Any], calls: Iterable[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
    """Raise what a check says of these options if it says so whatever the tensors are: in each of these calls."""
    refused: Exception | None = None
    for call in calls:
        try:
            check(**{**call, **options})
        except (OptionError, DtypeError) as error:
            refused = refused or error
        except Exception:
            # Other errors are about the tensors, which only the module's call will bring.
            return
        else:
            return
    if refused is not None:
        raise refused
