# SPDX-License-Identifier: Apache-2.0
"""Models with Liger's ops already applied."""

from __future__ import annotations

from collections.abc import Mapping
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
        chosen = _chosen(liger, options)
        return _applied(AutoModelForCausalLM.from_pretrained(*args, **options), chosen)

    @classmethod
    def from_config(cls, *args: Any, liger: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Make a model with random weights and apply Liger to it."""
        chosen = _chosen(liger, options)
        return _applied(AutoModelForCausalLM.from_config(*args, **options), chosen)


def _chosen(liger: Mapping[str, Any] | None, others: Mapping[str, Any]) -> dict[str, Any]:
    for name in OPTIONS:
        if name in others:
            raise OptionError(
                f"AutoLigerModelForCausalLM: {name} must be given in liger=, write liger={{{name!r}: {others[name]!r}}}"
            )
    if liger is not None and (not isinstance(liger, Mapping) or not liger.keys() <= set(OPTIONS)):
        got = sorted(liger) if isinstance(liger, Mapping) else liger
        raise OptionError(
            f"AutoLigerModelForCausalLM: liger must be a mapping with keys among {', '.join(OPTIONS)}, got {got!r}"
        )
    return dict(liger or {})


def _applied(model: Any, options: dict[str, Any]) -> Any:
    report = apply(model, **options)
    model.liger_report = report
    return model
