# SPDX-License-Identifier: Apache-2.0
"""The `liger` command: `doctor` and `ops`, and whatever the plugins add."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from liger_core import selection
from liger_core.errors import LigerError
from liger_core.plugins import registry
from liger_core.tables import Column, output, print_table

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def main() -> None:
    """Run the command; a LigerError ends it with its sentence and exit code 2."""
    try:
        app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fused operators for training large language models.")
        registry().manager.hook.liger_commands(app=app)
        app()
    except LigerError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False)
        sys.exit(2)


def add(app: typer.Typer) -> None:
    """Add core's own commands."""
    app.command()(doctor)
    app.command()(ops)


def doctor(as_json: AsJson = False) -> None:
    """Tell what runs here: versions, devices, backends, plugins and the selection in force; exit code 1 if a plugin failed."""
    import torch

    found = registry()
    selection.settle()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {
            name: _version(name) for name in ("liger-core", "liger-triton", "liger-hf", "liger-bench", "torch", "triton", "transformers")
        },
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "backends": {
            name: {
                "device_types": list(backend.device_types),
                "priority": backend.priority,
                "from": backend.distribution,
                "ops": sorted(found.implementations.get(name, {})),
                "unavailable": found.unavailable.get(name),
            }
            for name, backend in found.backends.items()
        },
        "failed_plugins": found.failed,
        "blocked_plugins": list(found.blocked),
        selection.VARIABLE: os.environ.get(selection.VARIABLE),
        "selected": {name: selection.selected(op)[0] for name, op in found.ops.items()},
    }
    if as_json:
        print(json.dumps(report))
    else:
        _print_report(report)
    if found.failed:
        raise typer.Exit(1)


def ops(as_json: AsJson = False) -> None:
    """List every op, what it does, and which backends implement it."""
    found = registry()
    rows = {
        name: {
            "summary": (op.__doc__ or "").strip().splitlines()[0],
            "signature": str(op.signature),
            "backends": [b for b, table in found.implementations.items() if name in table],
            "selected": selection.selected(op)[0],
        }
        for name, op in found.ops.items()
    }
    if as_json:
        print(json.dumps(rows))
        return
    console = output()
    columns = [Column("op"), *(Column(name) for name in found.backends), Column("summary", prose=True)]
    cells = [[name, *("✓" if b in row["backends"] else "–" for b in found.backends), str(row["summary"])] for name, row in rows.items()]
    print_table(console, columns, cells)
    for name, reason in found.unavailable.items():
        console.print(f"{name} is unavailable: {reason}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_report(report: dict[str, Any]) -> None:
    console = output()
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    console.print(f"Python {report['python']} on {report['platform']}\n{versions}\ndevices: {', '.join(report['devices'])}")
    columns = [Column("backend"), Column("devices", prose=True), Column("priority", number=True), Column("ops", number=True)]
    columns += [Column("from", prose=True), Column("state", prose=True)]
    rows = [
        [name, " ".join(b["device_types"]), str(b["priority"]), str(len(b["ops"])), b["from"], b["unavailable"] or "available"]
        for name, b in report["backends"].items()
    ]
    print_table(console, columns, rows)
    variable = report[selection.VARIABLE]
    console.print(f"{selection.VARIABLE}: {variable if variable else 'not set (auto)'}")
    for name, reason in report["failed_plugins"].items():
        console.print(f"[red]plugin {name} failed[/red]: {reason}")
    for name in report["blocked_plugins"]:
        console.print(f"plugin {name} is blocked by LIGER_DISABLE_PLUGINS")
