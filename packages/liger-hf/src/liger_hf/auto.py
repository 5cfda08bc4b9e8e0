# SPDX-License-Identifier: Apache-2.0
"""Models with Liger's ops already applied."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoModelForCausalLM

from liger_core import OptionError
from liger_hf.application import apply

OPTIONS = ("only", "exclude", "verify")


class AutoLigerModelForCausalLM:
    """`AutoModelForCausalLM`, followed by `liger_hf.apply`; the report is `model.liger_report`.

    It takes AutoModelForCausalLM's arguments; `liger` holds the arguments of `apply`: `liger={"exclude": ["rope"]}`.
    """

    def __init__(self) -> None:
        raise OptionError(
            "AutoLigerModelForCausalLM: a model must be made with from_pretrained or from_config, got a call of the "
            "class"
        )

    @classmethod
    def from_pretrained(cls, *args: Any, liger: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Load a pretrained model and apply Liger to it."""
        return _applied(AutoModelForCausalLM.from_pretrained, args, liger, options)

    @classmethod
    def from_config(cls, *args: Any, liger: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Make a model with random weights and apply Liger to it."""
        return _applied(AutoModelForCausalLM.from_config, args, liger, options)


def _applied(make: Callable[..., Any], args: Any, liger: Mapping[str, Any] | None, options: Mapping[str, Any]) -> Any:
    for name in OPTIONS:
        if name in options:
            raise OptionError(
                f"AutoLigerModelForCausalLM: {name} must be given in liger=, write "
                f"liger={{{name!r}: {options[name]!r}}}"
            )
    if liger is not None and (not isinstance(liger, Mapping) or not liger.keys() <= set(OPTIONS)):
        got = sorted(liger) if isinstance(liger, Mapping) else liger
        raise OptionError(
            f"AutoLigerModelForCausalLM: liger must be a mapping with keys among {', '.join(OPTIONS)}, got {got!r}"
        )
    model = make(*args, **options)
    model.liger_report = apply(model, **(liger or {}))
    return model
