# SPDX-License-Identifier: Apache-2.0
"""The `liger` command: `doctor`, `ops`, and the commands of plugins."""

import errno
import importlib.metadata
import json
import os
import platform
import sys
from functools import partial
from itertools import chain
from typing import Annotated, Any

import typer
import typer.main
from rich.console import Console
from rich.markup import escape

from liger_core import selection
from liger_core.errors import BackendError, LigerError, nearest
from liger_core.plugins import DISABLE, PROJECT, Plugin, Registry, attempt, blaming, keeper, registry
from liger_core.tables import Column, output, print_table
from liger_core.versions import complaints

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
# Libraries, besides this project's own, whose versions matter most for a bug report.
OTHERS = ("torch", "triton", "transformers")


def main() -> None:
    """Run the command. A LigerError ends it with its message and exit code 2, a full disk with exit code 1."""
    try:
        app = typer.Typer(
            no_args_is_help=True, add_completion=False, help="Fused ops for training large language models."
        )
        app.callback()(_options)
        _add_commands(app, registry())
        app()
    except LigerError as error:
        Console(stderr=True).print(
            f"[red]{type(error).__name__}[/red]: {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # The buffered output is lost anyway, and Python would report an error for it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(
            "liger: not everything could be written: "
            f"{error.strerror}{f' ({error.filename})' if error.filename else ''}",
            file=sys.stderr,
        )
        sys.exit(1)


def _add_commands(app: typer.Typer, registry: Registry) -> None:
    """Add the commands of every plugin; one that fails here loses only its own."""
    parts: dict[Plugin, typer.Typer] = {}
    names: dict[str, list[Plugin]] = {}
    for plugin, hook in registry.hooks("liger_commands"):
        plugin_app = typer.Typer()
        with blaming(registry, [plugin], "its commands"):
            attempt("its hook liger_commands", partial(hook.function, **dict.fromkeys(hook.argnames, plugin_app)))
            # Typer builds all commands when it runs one, so a command that cannot be built would break the others.
            for name in attempt("building its commands", partial(_names, plugin_app)):
                names.setdefault(name, []).append(plugin)
            parts[plugin] = plugin_app
    for name, rivals in names.items():
        keeps = keeper(registry, "command", name, rivals, "all commands of ")
        for plugin in rivals:
            if plugin is not keeps:
                parts.pop(plugin, None)
    for plugin_app in parts.values():
        app.registered_commands += plugin_app.registered_commands
        app.registered_groups += plugin_app.registered_groups


def _names(plugin_app: typer.Typer) -> list[str]:
    return list(typer.main.get_group(plugin_app).commands)


def _print_versions(show: bool) -> None:
    if show:
        print("\n".join(f"{name} {version or 'not installed'}" for name, version in _versions().items()))
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_versions, help="Print the versions of the packages, then exit."
        ),
    ] = False,
) -> None:
    """Fused ops for training large language models."""


def add(app: typer.Typer) -> None:
    """Add core's own commands."""
    app.command()(doctor)
    app.command()(ops)


def doctor(as_json: AsJson = False) -> None:
    """Print what runs here: versions, devices, backends, plugins, and the selection.

    Exit code 1 if a plugin or LIGER_BACKEND is wrong.
    """
    import torch

    loaded = registry()
    try:
        selection.settle()
        wrong = None
    except BackendError as error:
        wrong = str(error)
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
        "untested_versions": complaints(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "backends": {
            name: {
                "device_types": list(backend.device_types),
                "priority": backend.priority,
                "automatic": backend.automatic,
                "from": backend.distribution,
                "ops": sorted(loaded.implementations.get(name, {})),
                "unavailable": loaded.unavailable.get(name),
            }
            for name, backend in loaded.backends.items()
        },
        "failed_plugins": loaded.failed,
        "disabled_plugins": [name for name in loaded.disabled if name in loaded.installed],
        "notes": [
            f"{DISABLE}: no plugin named {name!r}; installed: "
            f"{', '.join(loaded.installed)}.{nearest(name, loaded.installed)}"
            for name in loaded.disabled
            if name not in loaded.installed
        ],
        selection.VARIABLE: os.environ.get(selection.VARIABLE),
        "selection_error": wrong,
        "selected": {} if wrong else {name: selection.selected(op)[0] for name, op in loaded.ops.items()},
    }
    if as_json:
        print(json.dumps(report))
    else:
        _print_report(report)
    if loaded.failed or wrong:
        raise typer.Exit(1)


def ops(as_json: AsJson = False) -> None:
    """List every op, what it does, and which backends implement it."""
    loaded = registry()
    rows = {
        name: {
            "summary": (op.__doc__ or "").strip().splitlines()[0],
            "signature": str(op.signature),
            "backends": [b for b, table in loaded.implementations.items() if name in table],
            "selected": selection.selected(op)[0],
        }
        for name, op in loaded.ops.items()
    }
    if as_json:
        print(json.dumps(rows))
        return
    console = output()
    columns = [Column("op"), *(Column(name) for name in loaded.backends), Column("summary", prose=True)]
    cells = [
        [name, *("✓" if b in row["backends"] else "–" for b in loaded.backends), str(row["summary"])]
        for name, row in rows.items()
    ]
    print_table(console, columns, cells)
    for name, reason in loaded.unavailable.items():
        console.print(f"{name} is unavailable: {reason}")


def _versions() -> dict[str, str | None]:
    """Return the versions of this project's packages and of OTHERS, without importing any."""
    return {name: _version(name) for name in (*PROJECT, *OTHERS)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_report(report: dict[str, Any]) -> None:
    console = output()
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    console.print(
        f"Python {report['python']} on {report['platform']}\n{versions}\ndevices: {', '.join(report['devices'])}"
    )
    for said in report["untested_versions"]:
        console.print(f"[yellow]untested versions[/yellow]: {said}")
    columns = [
        Column("backend"),
        Column("devices", prose=True),
        Column("priority", number=True),
        Column("ops", number=True),
    ]
    columns += [Column("from", prose=True), Column("state", prose=True)]
    rows = [
        [
            name,
            " ".join(b["device_types"]),
            str(b["priority"]),
            str(len(b["ops"])),
            b["from"],
            b["unavailable"] or ("available" if b["automatic"] else "available, selected by name only"),
        ]
        for name, b in report["backends"].items()
    ]
    print_table(console, columns, rows)
    variable = report[selection.VARIABLE]
    console.print(f"{selection.VARIABLE}: {variable or 'not set (auto)'}")
    for fault in [
        *dict.fromkeys(chain(*report["failed_plugins"].values())),
        *filter(None, [report["selection_error"]]),
    ]:
        console.print(f"[red]error[/red]: {escape(fault)}")
    for name in report["disabled_plugins"]:
        console.print(f"plugin {name} is disabled by {DISABLE}")
    for note in report["notes"]:
        console.print(f"note: {escape(note)}")
