# SPDX-License-Identifier: Apache-2.0
"""The tensors of an op that must share a dtype, and how autocast casts them if they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks


class Dtypes(NamedTuple):
    """Groups of tensor arguments, by name; all arguments in a group must have the same dtype.

    Outside autocast, nothing is cast silently. Under autocast, each group is promoted to the widest dtype in it, as
    torch promotes x + residual, or, with `matmul`, cast to the dtype of autocast, as for torch.nn.functional.linear.
    """

    alike: tuple[tuple[str, ...], ...]
    matmul: bool = False


# Every tensor may have its own dtype.
ANY = Dtypes(())


def same_dtypes(dtypes: Dtypes, parameters: tuple[str, ...]) -> Callable[[tuple[Any, ...], Mapping[str, Any]], bool]:
    """Return a function of a call's arguments that says whether their dtypes match and `settled` can be skipped.

    It runs in every call.
    """
    groups = tuple(tuple((parameters.index(name), name) for name in group) for group in dtypes.alike)

    def same(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        for group in groups:
            first = None
            for i, name in group:
                value = args[i] if i < len(args) else kwargs.get(name)
                if value is None:
                    continue
                if first is None:
                    first = value
                    if dtypes.matmul and autocast_dtype(value.device.type) is not None:
                        return False
                elif value.dtype != first.dtype:
                    return False
        return True

    return same


def settled(op: str, dtypes: Dtypes, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in the dtypes that the op takes.

    Raises DtypeError if the dtypes in a group differ and autocast does not cast them.
    """
    result = dict(arguments)
    for group in dtypes.alike:
        given: dict[str, Tensor] = {name: arguments[name] for name in group if arguments.get(name) is not None}
        if not given:
            continue
        first, *others = given
        found = {value.dtype for value in given.values()}
        low = autocast_dtype(given[first].device.type)
        # An in-place op must write to the caller's tensor, not to a copy in another dtype.
        if low is None or arguments.get("inplace") or (dtypes.matmul and torch.float64 in found):
            checks.same_dtype(op, first, given[first], **{name: given[name] for name in others})
            continue
        dtype = low if dtypes.matmul else reduce(torch.promote_types, found)
        result |= {name: value.to(dtype) for name, value in given.items()}
    return result


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the autocast dtype for this device type, or None if autocast is off."""
    # Meta tensors have no autocast; torch.compile of PyTorch 2.11 cannot trace the question whether there is one.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
