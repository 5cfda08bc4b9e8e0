# SPDX-License-Identifier: Apache-2.0
"""What goes to the constructor of a generated module, and what to its call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from liger_core.errors import OptionError, nearest
from liger_core.op import Op

Parameter = inspect.Parameter


def parameters_of(function: Any) -> dict[str, Parameter]:
    """The parameters of an op or a function by name, with their annotations as objects, so that `help` can show them."""
    function = function.reference if isinstance(function, Op) else function
    try:
        return dict(inspect.signature(function, eval_str=True).parameters)
    except NameError:
        # A name that only a type checker imports.
        return dict(inspect.signature(function).parameters)


def keywords(parameters: Iterable[Parameter]) -> list[Parameter]:
    return [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]


def subclass(name: str, parent: type, docstring: str, signature: inspect.Signature, **body: Any) -> Any:
    """A generated module; it belongs to the file that calls the function that calls this, where pickle looks for it."""
    own = {"__doc__": docstring, "__init__": with_signature(parent.__init__, signature), "signature": signature}  # type: ignore[misc]
    return type(name, (parent,), {**own, "__module__": sys._getframe(2).f_globals["__name__"], **body})


def with_signature(constructor: Callable[..., None], signature: inspect.Signature) -> Callable[..., None]:
    """The same constructor, which shows what it takes."""

    @functools.wraps(constructor)
    def __init__(self: Any, *inputs: Any, **named: Any) -> None:
        constructor(self, *inputs, **named)

    itself = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = inspect.Signature([itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    return __init__


def like(parent: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For the constructor of a module that takes what its parent takes."""
    return lambda constructor: with_signature(constructor, inspect.signature(parent))


def with_options(options: Mapping[str, Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a constructor whose `**options` are these."""

    def described(constructor: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in parameters_of(constructor).values() if p.kind is not Parameter.VAR_KEYWORD]
        return with_signature(constructor, inspect.Signature([*own[1:], *options.values()]))

    return described


def arguments_of(module: nn.Module, names: tuple[str, ...], inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, be they passed by position or by name."""
    if len(inputs) > len(names):
        raise TypeError(f"{type(module).__name__}: the call must have at most {', '.join(names)}, got {len(inputs)} values")
    by_position = dict(zip(names, inputs, strict=False))
    for name in named:
        if name in by_position:
            raise TypeError(f"{type(module).__name__}: {name} must be given once, got it by position and by name")
    return by_position | named


def check_known(module: str, given: Iterable[str], known: Collection[str], what: str = "options") -> None:
    for name in given:
        if name not in known:
            words = f"be among {', '.join(known)}" if known else "be none"
            raise OptionError(f"{module}: {what} must {words}, got {name!r}.{nearest(name, known)}")


def bound(
    module: str, signature: inspect.Signature, of_call: Iterable[str], inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a constructor by name."""
    options = [name for name, parameter in signature.parameters.items() if parameter.default is not Parameter.empty]
    for name in named:
        if name in of_call:
            raise OptionError(f"{module}: {name} must be passed in the call, got it in the constructor")
        if name not in signature.parameters:
            check_known(module, [name], options)
    try:
        return dict(signature.bind(*inputs, **named).arguments)
    except TypeError as problem:
        raise TypeError(f"{module}: {problem}") from None
