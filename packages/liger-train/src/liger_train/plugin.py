# SPDX-License-Identifier: Apache-2.0
"""The plugin of liger-train: the commands `liger train`, `liger plan`, `liger report` and `liger demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def liger_commands(app: typer.Typer) -> None:
    from liger_bench.options import checked
    from liger_train.demo.command import demo
    from liger_train.plan.command import plan
    from liger_train.report.command import report
    from liger_train.runs.command import train

    app.command()(checked(train))
    app.command()(checked(plan))
    app.command()(checked(report))
    app.command()(checked(demo))
