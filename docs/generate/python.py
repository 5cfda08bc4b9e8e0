# SPDX-License-Identifier: Apache-2.0
"""Reference pages of the Python API: the public names of a package, which mkdocstrings fills from the docstrings."""

import importlib
from types import ModuleType
from typing import Any

from liger_bench import markdown
from liger_core import Op

# Package → what the page begins with. Ops have pages of their own.
PACKAGES = {
    "liger_hf": "Apply Liger to Hugging Face models. `liger_hf.compat` stands in for the package liger-kernel, `liger_hf.trainers` has heads for verl, prime-rl and Megatron-core.",
    "liger_core": "Select backends, explain a call, and describe ops and backends. The ops themselves are under [Ops](../ops/index.md).",
    "liger_core.losses": "Preference, policy and fine-tuning losses on log-probabilities or heads; [Losses](../../losses.md) explains them.",
    "liger_core.nn": "Modules for your own models; [a recipe](../../how-to/own-models.md) builds one.",
    "liger_core.kernels": "Custom ops and autograd for kernels: what a backend with kernels of its own builds on.",
}


def pages() -> dict[str, str]:
    """Name of the page → its text."""
    return {"index": _index(), **{name: _page(name) for name in PACKAGES}}


def _index() -> str:
    rows = [(f"[`{name}`]({name}.md)", text.split(". ")[0].rstrip(".")) for name, text in PACKAGES.items()]
    return f"# Python API\n\n{markdown.table(('module', 'what it is for'), rows)}\n"


def _page(name: str) -> str:
    module = importlib.import_module(name)
    shown = [f"::: {path}" for attribute in _public(module) if (path := _path(getattr(module, attribute))) is not None]
    return "\n\n".join([f"# {name}", PACKAGES[name], *shown]) + "\n"


def _public(module: ModuleType) -> list[str]:
    """`__all__`, or the public functions and classes that the module itself defines, in order."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def _path(value: Any) -> str | None:
    """Where the object is defined; None for ops, and for what has no docstring to show."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, Op) or not hasattr(value, "__qualname__") or not value.__doc__:
        return None
    return f"{value.__module__}.{value.__qualname__}"
