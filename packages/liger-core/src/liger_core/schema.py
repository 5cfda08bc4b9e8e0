# SPDX-License-Identifier: Apache-2.0
"""The schema of a kernel, read from the signature of its launch."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

# The annotations that parameters of `launch` may have, and the schema type of each.
_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "int",
    float: "float",
    float | None: "float?",
    str: "str",
    str | None: "str?",
    torch.dtype | None: "ScalarType?",
    list[bool]: "bool[]",
    list[float]: "float[]",
}

# For each parameter, the constructor of its NamedTuple, if it is one, and its number of fields; None if none is one.
Groups = list[tuple[Callable[..., Any] | None, int]] | None
# Names and annotations of parameters.
_Parameters = list[tuple[str, Any]]


class Field(NamedTuple):
    """The name and the schema type of a value that a kernel takes or returns."""

    name: str
    type: str


class Schema(NamedTuple):
    """The values that a kernel takes and returns; a parameter that is a NamedTuple stands for all of its fields."""

    arguments: list[Field]
    returns: list[Field]

    def __str__(self) -> str:
        arguments, returns = (", ".join(f"{field.type} {field.name}" for field in side) for side in self)
        return f"({arguments}) -> ({returns})"


def read_schema(kernel: str, launch: Callable[..., None]) -> tuple[Schema, Groups, Groups]:
    """Return the schema of a kernel, and which of its values are fields of one input or of one output."""
    types, parameters = get_type_hints(launch), inspect.signature(launch).parameters.values()
    outputs = [(p.name, types.get(p.name)) for p in parameters if p.kind is p.POSITIONAL_ONLY]
    inputs = [(p.name, types.get(p.name)) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not outputs or len(outputs) + len(inputs) != len(parameters):
        raise TypeError(
            f"{kernel}: launch must take outputs, a slash and inputs, (y, /, x, weight), got "
            f"{inspect.signature(launch)}"
        )
    return Schema(_fields(kernel, inputs), _fields(kernel, outputs)), _groups(inputs), _groups(outputs)


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _groups(parameters: _Parameters) -> Groups:
    if not any(_is_group(kind) for _, kind in parameters):
        return None
    return [(kind._make, len(kind._fields)) if _is_group(kind) else (None, 1) for _, kind in parameters]


def _fields(kernel: str, parameters: _Parameters) -> list[Field]:
    flat: _Parameters = []
    for name, kind in parameters:
        flat.extend(get_type_hints(kind).items() if _is_group(kind) else [(name, kind)])
    for name, kind in flat:
        if kind not in _TYPES:
            known = ", ".join(getattr(t, "__name__", str(t)) for t in _TYPES)
            raise TypeError(
                f"{kernel}: {name} must be annotated with one of {known} or a NamedTuple of these, got {kind}"
            )
    return [Field(name, _TYPES[kind]) for name, kind in flat]
