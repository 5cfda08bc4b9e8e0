# SPDX-License-Identifier: Apache-2.0
"""`TrainingArguments(use_liger_kernel=True)` with Liger, if the package liger-kernel is not installed."""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from liger_core import OptionError
from liger_hf.application import apply
from liger_hf.discovery import replaceable_ops
from liger_hf.private_transformers import LIGER_KERNEL, forget_liger_kernel
from liger_hf.report import Report

NAME = "liger_kernel"
# The oldest version that Transformers accepts; the label says that it is ours.
VERSION = "0.3.0+liger.hf"
# Keys of liger_kernel_config beside the names of our ops. cross_entropy alone would keep all the logits.
OTHER_KEYS = {"fused_linear_cross_entropy": "linear_cross_entropy", "cross_entropy": None}
# liger-kernel has one op for norms, so leaving it out also leaves out the ops that contain a norm.
MORE_THAN_NORMS = {
    "rms_norm": ("add_rms_norm", "qk_norm_rope", "gated_rms_norm", "modulated_rms_norm"),
    "layer_norm": ("add_layer_norm", "modulated_layer_norm"),
}

_installed: list["StandIn"] = []


class StandIn(AbstractContextManager["StandIn"]):
    """The modules that `install` added to `sys.modules`; `undo()`, or the end of a `with` block, removes them."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.modules = modules

    def undo(self) -> None:
        """Remove the stand-in; models are unchanged, and a second call does nothing."""
        for name, module in self.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        if self in _installed:
            _installed.remove(self)
            forget_liger_kernel()

    def __exit__(self, *_: object) -> None:
        self.undo()


def install(show: Callable[[Report], Any] | None = print) -> StandIn:
    """Make `use_liger_kernel=True` in TrainingArguments call `liger_hf.apply`, in this process.

    show  called with each report, on the first process; print by default, None for nothing

    A key of `liger_kernel_config` set to False leaves that op out; all are put in by default. Keys that name none of
    the ops are noted in the report. Transformers imports a package named liger_kernel; until `undo`, a module of that
    name provides the one function that Transformers calls. A second call returns the existing stand-in.

    Raises OptionError if liger-kernel is installed or has been imported.
    """
    if _installed:
        return _installed[0]
    installed = sys.modules.get(NAME) or importlib.util.find_spec(NAME)
    if installed is not None:
        where = getattr(installed, "origin", getattr(installed, "__file__", NAME))
        raise OptionError(
            "liger_hf.compat.install: liger-kernel must not be installed, since it has the name that Transformers "
            f"looks for, got {where}; use Trainer(..., callbacks=[liger_hf.LigerCallback()]) instead, or uninstall it"
        )
    package, inner = _module(NAME), _module(f"{NAME}.transformers")
    package.__dict__.update(__version__=VERSION, transformers=inner)
    inner.__dict__[LIGER_KERNEL] = _applier(show)
    stand_in = StandIn({NAME: package, inner.__name__: inner})
    sys.modules.update(stand_in.modules)
    _installed.append(stand_in)
    forget_liger_kernel()
    return stand_in


def _module(name: str) -> ModuleType:
    module = ModuleType(name, "Stands in for liger-kernel; put here by liger_hf.compat.install().")
    # Transformers looks for packages by their specs, and a package has a path.
    module.__spec__ = ModuleSpec(name, loader=None, origin=__file__, is_package=True)
    module.__dict__.update(__file__=__file__, __path__=[])

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"{name}: liger_hf.compat has only what the Trainer of Transformers calls, not {attribute!r}; use "
            "liger_hf.apply(model)"
        )

    module.__dict__["__getattr__"] = missing
    return module


def _applier(show: Callable[[Report], Any] | None) -> Callable[..., None]:
    def _apply_liger_kernel_to_instance(model: Any, **config: Any) -> None:
        report = apply(model, exclude=_excluded(config))
        unknown = [key for key in config if key not in replaceable_ops() and key not in OTHER_KEYS]
        if unknown:
            report.notes.append(f"liger_kernel_config: {', '.join(unknown)} names no op of Liger and was ignored.")
        if config.get("cross_entropy") and not config.get("fused_linear_cross_entropy", True):
            report.notes.append(
                "liger_kernel_config: cross_entropy comes with fused_linear_cross_entropy, alone it was ignored."
            )
        if show is not None and os.environ.get("RANK", "0") == "0":
            show(report)

    return _apply_liger_kernel_to_instance


def _excluded(config: dict[str, Any]) -> list[str]:
    if any(not isinstance(value, bool) for value in config.values()):
        raise OptionError(f"liger_kernel_config: every value must be True or False, got {config}")
    flags = {op: config[norm] for norm, ops in MORE_THAN_NORMS.items() if norm in config for op in ops} | config
    names = ((OTHER_KEYS.get(key, key if key in replaceable_ops() else None), value) for key, value in flags.items())
    return [name for name, value in names if name is not None and not value]
