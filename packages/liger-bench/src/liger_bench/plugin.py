# SPDX-License-Identifier: Apache-2.0
"""The plugin of liger-bench: the commands `liger bench …`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liger_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def liger_commands(app: typer.Typer) -> None:
    from liger_bench.bench.command import DEFAULT, bench_group, ops, scaling
    from liger_bench.options import checked
    from liger_bench.sharded.command import sharded

    bench = bench_group()
    bench.command(DEFAULT)(checked(ops))
    bench.command("scaling")(checked(scaling))
    bench.command()(checked(sharded))
    app.add_typer(bench, name="bench")
