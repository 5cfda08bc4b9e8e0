# SPDX-License-Identifier: Apache-2.0
"""Which tensors of an op must have one dtype, and what autocast makes of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks


class Dtypes(NamedTuple):
    """Groups of tensor arguments that must have one dtype, by name.

    Outside autocast, nothing is cast silently. Under autocast, each group is promoted to the widest dtype in it, as torch promotes x + residual,
    or, with `matmul`, cast to the dtype of autocast, as for torch.nn.functional.linear.
    """

    alike: tuple[tuple[str, ...], ...]
    matmul: bool = False


# Every tensor may have its own dtype.
ANY = Dtypes(())


def same_dtypes(dtypes: Dtypes, parameters: tuple[str, ...]) -> Callable[[tuple[Any, ...], Mapping[str, Any]], bool]:
    """Whether a call needs no `settled`: a function of its arguments, which runs in every call."""
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
    """The arguments in the dtypes that the op takes; raises DtypeError for what autocast does not cast."""
    result = dict(arguments)
    for group in dtypes.alike:
        given: dict[str, Tensor] = {name: arguments[name] for name in group if arguments.get(name) is not None}
        if not given:
            continue
        first, *others = given
        found = {value.dtype for value in given.values()}
        low = autocast_dtype(given[first].device.type)
        # What is written in place is the caller's tensor, not a copy in another dtype.
        if low is None or arguments.get("inplace") or (dtypes.matmul and torch.float64 in found):
            checks.same_dtype(op, first, given[first], **{name: given[name] for name in others})
            continue
        dtype = low if dtypes.matmul else reduce(torch.promote_types, found)
        result |= {name: value.to(dtype) for name, value in given.items()}
    return result


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on this type of device; None where it is off."""
    # Meta tensors have no autocast; torch.compile of PyTorch 2.11 cannot trace the question whether there is one.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
