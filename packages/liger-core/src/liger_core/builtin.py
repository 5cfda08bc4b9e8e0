# SPDX-License-Identifier: Apache-2.0
"""Core's own plugin: its ops, the backend `reference` and its commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from liger_core import ops
from liger_core.backend import DEVICE_TYPES, Backend
from liger_core.hookspecs import hookimpl
from liger_core.op import Op

if TYPE_CHECKING:
    import typer


CATALOGUE: tuple[Op[..., Any], ...] = tuple(value for value in vars(ops).values() if isinstance(value, Op))


@hookimpl
def liger_ops() -> list[Op[..., Any]]:
    return list(CATALOGUE)


@hookimpl
def liger_backends() -> list[Backend]:
    return [Backend("reference", DEVICE_TYPES, 0, {op: op.reference for op in CATALOGUE}, supports_fake_tensors=True)]


@hookimpl
def liger_commands(app: typer.Typer) -> None:
    from liger_core import commands

    commands.add(app)
