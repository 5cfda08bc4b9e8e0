# SPDX-License-Identifier: Apache-2.0
"""`liger inspect MODEL`: what of a model the ops can replace."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from liger_core.errors import OptionError, nearest

# In fewer columns the table folds in the middle of words.
TABLE_WIDTH = 160
DTYPES = ("float32", "bfloat16", "float16")

Source = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder with a config.json, a model type of Transformers, or a name on the hub.")
]
Only = Annotated[list[str] | None, typer.Option("--only", help="An op to look for; repeatable; all by default.", show_default=False)]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", help="An op to leave out; repeatable.", show_default=False)]
Dtype = Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; that of the config by default.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="Where to check; cuda if there is one, else cpu.", show_default=False)]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Compare gradients too, not outputs alone.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def inspect(
    model: Source,
    only: Only = None,
    exclude: Exclude = None,
    dtype: Dtype = None,
    device: Device = None,
    verify: Verify = True,
    as_json: AsJson = False,
) -> None:
    """Tell which modules of a model could be replaced by which ops, and why others cannot; no weights are loaded."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"liger inspect: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.{nearest(dtype, DTYPES)}")
    # Here: the other commands need no Transformers, whose import takes seconds.
    from liger_hf.inspection import config_of, inspect

    report = inspect(config_of(model), only=only, exclude=exclude, verify=verify, dtype=dtype, device=device)
    if as_json:
        print(report.to_json())
        return
    console = Console(highlight=False)
    if console.width >= TABLE_WIDTH:
        console.print(report.table())
    else:
        console.print(str(report), soft_wrap=True, markup=False)
