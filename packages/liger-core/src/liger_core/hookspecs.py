# SPDX-License-Identifier: Apache-2.0
"""The hooks that a plugin may implement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer

    from liger_core.backend import Backend
    from liger_core.op import Op

hookspec = pluggy.HookspecMarker("liger")
hookimpl = pluggy.HookimplMarker("liger")


@hookspec
def liger_ops() -> Iterable[Op[..., Any]]:  # type: ignore[empty-body]
    """The ops that this plugin defines."""


@hookspec
def liger_backends() -> Iterable[Backend]:  # type: ignore[empty-body]
    """The backends that this plugin provides."""


@hookspec
def liger_rules() -> Iterable[Any]:  # type: ignore[empty-body]
    """The rules, each a `liger_hf.rule.Rule`, that replace parts of a Hugging Face model with ops."""


@hookspec
def liger_commands(app: typer.Typer) -> None:
    """Add commands to the `liger` command."""
