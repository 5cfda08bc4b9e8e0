# SPDX-License-Identifier: Apache-2.0
"""The plugin of liger-verify: the command `liger verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def liger_commands(app: typer.Typer) -> None:
    from liger_verify.command import verify

    app.command()(verify)
