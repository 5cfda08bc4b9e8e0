# SPDX-License-Identifier: Apache-2.0
"""One reference page per command, from the help of Typer."""

import re
from typing import Any

import typer
import typer.main
from docstrings import cell

from liger_bench import markdown
from liger_core import commands
from liger_core.plugins import registry

NAME = "liger"
# `--batch <int>` in the help of Typer, and how it ends.
OPTION = re.compile(r"(?P<names>.*?)(?: (?P<kind><.*>))?$")
ENDING = re.compile(r"\s*\[(?:default: (?P<default>.*?)|(?P<required>required))\]$")


def pages() -> dict[str, str]:
    """Name of the page → its text; a group of commands is one page."""
    app = typer.Typer()
    app.callback()(commands._options)
    commands._add_commands(app, registry())
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name=NAME)
    named = {name: group.get_command(context, name) for name in group.list_commands(context)}
    texts = {
        name: _page(command, typer.Context(command, info_name=name, parent=context)) for name, command in named.items()
    }
    return {"index": _index(named), **texts}


def _index(named: dict[str, Any]) -> str:
    rows = [(f"[`{NAME} {name}`]({name}.md)", cell(each.get_short_help_str(200))) for name, each in named.items()]
    return f"""# Commands

Every command prints its options with `--help`. `{NAME} --version` prints the versions that matter for a bug report.

{markdown.table(("command", "what it does"), rows)}
"""


def _page(command: Any, context: typer.Context, level: int = 1) -> str:
    path = context.command_path
    lines = [f"{'#' * level} {path}", "", _escaped(command.help or ""), ""]
    if not hasattr(command, "list_commands"):
        lines += ["```text", f"{path} {' '.join(command.collect_usage_pieces(context))}", "```"]
        records = [p.get_help_record(context) for p in command.get_params(context) if p.name != "help"]
        rows = [_row(*record) for record in records if record is not None]
        if rows:
            lines += ["", markdown.table(("option", "default", "meaning"), rows), ""]
        return "\n".join(lines)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        lines += [_page(inner, typer.Context(inner, info_name=name, parent=context), level + 1), ""]
    return "\n".join(lines)


def _row(names: str, meaning: str) -> tuple[str, ...]:
    option = OPTION.match(names)
    assert option is not None
    ending = ENDING.search(meaning)
    # The default of a number is followed by its range: `1; x>=1`.
    value, _, bounds = (ending["default"] or "").partition("; ") if ending is not None else ("", "", "")
    default = "" if ending is None else "required" if ending["required"] else f"`{value}`"
    kind = (option["kind"] or "").strip("<>").removesuffix(" range")
    kind = f" {_escaped(f'{kind}, {bounds}' if bounds else kind)}" if kind else ""
    return f"`{option['names']}`{kind}", default, cell(_escaped(ENDING.sub("", meaning)))


def _escaped(text: str) -> str:
    """Text of the help, for Markdown."""
    return re.sub(r"([<>*_])", r"\\\1", text)
