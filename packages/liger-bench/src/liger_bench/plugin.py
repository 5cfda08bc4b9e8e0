# SPDX-License-Identifier: Apache-2.0
"""The plugin of liger-bench: the commands `liger bench …`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def liger_commands(app: typer.Typer) -> None:
    from liger_bench.bench.command import ops, scaling
    from liger_bench.bench.group import DEFAULT, bench_group
    from liger_bench.distributed.command import distributed
    from liger_bench.model.command import model
    from liger_bench.options import checked
    from liger_bench.report.command import report
    from liger_bench.sharded.command import sharded
    from liger_bench.step.command import step

    bench = bench_group()
    bench.command(DEFAULT)(checked(ops))
    bench.command("scaling")(checked(scaling))
    bench.command()(checked(model))
    bench.command()(checked(distributed))
    bench.command()(checked(sharded))
    bench.command()(checked(step))
    bench.command()(checked(report))
    app.add_typer(bench, name="bench")
