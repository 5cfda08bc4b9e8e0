# SPDX-License-Identifier: Apache-2.0
"""The implementations that run a model: Transformers alone, another library, or Liger, each also compiled."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Implementation:
    """An implementation of a model; patch(model) applies it and returns the name of the backend that runs it.

    module  what must be importable, and `install` what brings it
    """

    name: str
    patch: Callable[[PreTrainedModel], str]
    compiled: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    module: str | None = None
    install: str = ""

    def missing(self, device: str) -> str | None:
        """Return the reason why the implementation cannot run here, or None."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if self.module is not None and importlib.util.find_spec(self.module) is None:
            return f"not installed; pip install {self.install}"
        return None


def _plain(model: PreTrainedModel) -> str:
    return ""


def _liger(model: PreTrainedModel) -> str:
    import liger_hf

    report = liger_hf.apply(model)
    return ", ".join(sorted({row.backend for row in report.rows if row.backend}))


def _liger_kernel(model: PreTrainedModel) -> str:
    """Patch an existing model with the library's own function and its defaults, as the Transformers Trainer does."""
    patches: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    patches._apply_liger_kernel_to_instance(model=model)
    return "liger-kernel"


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("hf", _plain),
        Implementation("hf-compiled", _plain, compiled=True),
        Implementation("liger-kernel", _liger_kernel, devices=("cuda",), module="liger_kernel", install="liger-kernel"),
        Implementation("liger", _liger),
        Implementation("liger-compiled", _liger, compiled=True),
    )
}
