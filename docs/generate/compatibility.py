# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/start/install.md, from the packages' metadata and constraints.txt: `python docs/generate/compatibility.py` writes them.

They are in the repository, where README's reader finds them; tests/docs/test_site.py says when they are stale.
"""

import tomllib
from pathlib import Path
from typing import Any

import docstrings
from packaging.requirements import Requirement

from liger_bench import markdown

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "install.md"
# Libraries in the order of the table; others that the packages require follow.
FIRST = ("torch", "transformers", "triton", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes", "torchao")
OURS = "liger-"
SIGNS = {">=": "≥", "<=": "≤"}


def packages() -> dict[str, dict[str, Any]]:
    """Distribution → its [project] table."""
    projects = [tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    return {project["name"]: project for project in projects}


def pins() -> dict[str, str]:
    """Library → the version that the tests run with."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def versions() -> str:
    """A table of the libraries: allowed, and tested."""
    allowed: dict[str, list[tuple[str, str]]] = {}
    for name, project in packages().items():
        extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
        for line in [*project["dependencies"], *extras]:
            requirement = Requirement(line)
            specifiers = sorted(requirement.specifier, key=str, reverse=True)
            words = ", ".join(f"{SIGNS.get(s.operator, s.operator)} {s.version}" for s in specifiers) or "any"
            where = f"`{name}`" if line in project["dependencies"] else f"`{name}` (optional)"
            if not requirement.name.startswith(OURS):
                allowed.setdefault(requirement.name, []).append((words, where))
    tested = pins()
    order = [*FIRST, *sorted(set(allowed) - set(FIRST))]
    (pythons,) = {project["requires-python"] for project in packages().values()}
    rows = [("Python", pythons.replace(">=", "≥ "), "3.11", "every package")]
    for name in order:
        entries = allowed.get(name, [])
        if not entries and name not in tested:
            continue
        specifiers = "; ".join(dict.fromkeys(words for words, _ in entries)) or "any"
        users = ", ".join(dict.fromkeys(where for _, where in entries)) or "a recipe"
        rows.append((name, specifiers, tested.get(name, "–"), users))
    return markdown.table(("library", "allowed", "tested", "required by"), rows)


def extras() -> str:
    """A table of the extras: what `pip install package[extra]` adds."""
    rows = [
        (f"`{name}[{extra}]`", docstrings.code(*lines))
        for name, project in packages().items()
        for extra, lines in project.get("optional-dependencies", {}).items()
    ]
    return markdown.table(("install", "adds"), rows)


def filled(text: str) -> str:
    return docstrings.filled(text, versions=versions(), extras=extras())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
