# SPDX-License-Identifier: Apache-2.0
"""The command group `liger bench`, whose default command is the benchmark of the ops."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

DEFAULT = "ops"


class _OpsByDefault(TyperGroup):
    """Run the benchmark of the ops without a subcommand: `liger bench rope` is `liger bench ops rope`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


def bench_group() -> typer.Typer:
    """Return the group without commands; `liger_bench/plugin.py` registers them."""
    help = (
        f"Measure ops, and heads on several ranks. Without a command, `{DEFAULT}`: every op, for instance `liger bench "
        "rms_norm --quick`, "
        f"`liger bench --peers --out results`. `liger bench {DEFAULT} --help` lists its options."
    )
    return typer.Typer(cls=_OpsByDefault, help=help, subcommand_metavar="[COMMAND] [ARGS]...")
