# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/start/install.md, from the packages' metadata and constraints.txt: `python docs/generate/compatibility.py` writes them.

They are in the repository, where README's reader finds them; tests/docs/test_site.py says when they are stale.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "install.md"
# Libraries in the order of the table; others that the packages require follow.
FIRST = ("torch", "transformers", "triton", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "torchao")
OURS = "liger-"


def packages() -> dict[str, dict[str, object]]:
    """Distribution → its [project] table."""
    found = {}
    for path in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        found[project["name"]] = project
    return found


def pins() -> dict[str, str]:
    """Library → the version that the tests run with."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def versions() -> str:
    """A table of the libraries: allowed, and tested."""
    allowed: dict[str, list[str]] = {}
    for name, project in packages().items():
        extras: dict[str, list[str]] = project.get("optional-dependencies", {})  # type: ignore[assignment]
        lines = [*project["dependencies"], *(line for part in extras.values() for line in part)]  # type: ignore[misc]
        for requirement in map(Requirement, lines):
            if requirement.name.startswith(OURS):
                continue
            words = (
                ", ".join(
                    f"{_signs(s.operator)} {s.version}" for s in sorted(requirement.specifier, key=str, reverse=True)
                )
                or "any"
            )
            where = f"`{name}`" if requirement in map(Requirement, project["dependencies"]) else f"`{name}` (optional)"  # type: ignore[arg-type]
            allowed.setdefault(requirement.name, [])
            if (entry := f"{words}|{where}") not in allowed[requirement.name]:
                allowed[requirement.name].append(entry)
    tested = pins()
    order = [*FIRST, *sorted(set(allowed) - set(FIRST))]
    (pythons,) = {str(project["requires-python"]) for project in packages().values()}
    rows = ["| library | allowed | tested | required by |", "| --- | --- | --- | --- |"]
    rows.append(f"| Python | {pythons.replace('>=', '≥ ')} | 3.11 | every package |")
    for name in order:
        entries = [entry.split("|") for entry in allowed.get(name, [])]
        if not entries and name not in tested:
            continue
        specifiers = "; ".join(dict.fromkeys(words for words, _ in entries)) or "any"
        users = ", ".join(dict.fromkeys(where for _, where in entries)) or "a recipe"
        rows.append(f"| {name} | {specifiers} | {tested.get(name, '–')} | {users} |")
    return "\n".join(rows)


def _signs(operator: str) -> str:
    return {">=": "≥", "<=": "≤"}.get(operator, operator)


def extras() -> str:
    """A table of the extras: what `pip install package[extra]` adds."""
    rows = ["| install | adds |", "| --- | --- |"]
    for name, project in packages().items():
        for extra, lines in project.get("optional-dependencies", {}).items():  # type: ignore[union-attr, attr-defined]
            rows.append(f"| `{name}[{extra}]` | {', '.join(f'`{line}`' for line in lines)} |")
    return "\n".join(rows)


def filled(text: str) -> str:
    """A page with the tables between the comments `<!-- versions: begin -->` and `<!-- versions: end -->`, and so on."""
    tables = {"versions": versions(), "extras": extras()}
    between = re.compile(r"(?P<begin><!-- (?P<name>\w+): begin -->\n).*?(?P<end><!-- (?P=name): end -->)", re.DOTALL)
    return between.sub(lambda found: f"{found['begin']}\n{tables[found['name']]}\n\n{found['end']}", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
