# SPDX-License-Identifier: Apache-2.0
"""Makes the source of the site: `python docs/generate build/docs` copies docs/, adds the generated pages and the pages from the root.

Then any generator that reads mkdocs.yml can build it. What is generated is not in the repository, so it cannot be stale.
"""

from __future__ import annotations

import os.path
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import commands
import compatibility

import ops

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Files outside docs/ that are pages of the site.
FROM_ROOT = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
}
# What a link in the repository leads to on the site.
MOVED = {"README.md": "index.md", "examples/README.md": "how-to/index.md", **FROM_ROOT}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\(<?(?P<target>[^()\s<>#]+)(?P<anchor>#[^()\s<>]*)?>?\)")
CODE = re.compile(r"(^ *```.*?^ *```$)", flags=re.DOTALL | re.MULTILINE)


def main(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(DOCS, target, ignore=shutil.ignore_patterns("generate", "*.json", "__pycache__"))
    address = repository()
    for page, text in pages().items():
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        (target / page).write_text(text)
    sources = {page: PurePosixPath(source) for source, page in FROM_ROOT.items()}
    for path in target.rglob("*.md"):
        page = path.relative_to(target).as_posix()
        path.write_text(with_links(path.read_text(), sources.get(page, PurePosixPath("docs", page)), page, address))


def pages() -> dict[str, str]:
    """Path on the site → text of every page that is not in docs/."""
    found = {page: (ROOT / source).read_text() for source, page in FROM_ROOT.items()}
    found["reference/ops/index.md"] = ops.index()
    found |= {f"reference/ops/{op.name}.md": ops.page(op) for op in ops.ops()}
    found |= {f"reference/commands/{name}.md": text for name, text in commands.pages().items()}
    found["reference/versions.md"] = compatibility.page()
    return found


def repository() -> str:
    """The address of the repository, if mkdocs.yml has one."""
    line = re.search(r"^repo_url: *(\S+)", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    return line[1].rstrip("/") if line else ""


def with_links(text: str, source: PurePosixPath, page: str, address: str) -> str:
    """Links are written for the repository. Those that leave the site lead to its address; without one they are text."""

    def change(match: re.Match[str]) -> str:
        return link(match, source, page, address)

    return outside_code(text, lambda part: LINK.sub(change, part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if index % 2 else change(part) for index, part in enumerate(CODE.split(text)))


def link(match: re.Match[str], source: PurePosixPath, page: str, address: str) -> str:
    place = os.path.normpath(source.parent / match["target"])
    if re.match(r"[a-z]+:", match["target"]) or place.startswith("..") or not (ROOT / place).exists():
        return match[0]
    goal = MOVED.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
    if goal is not None and not (ROOT / place).is_dir():
        return f"[{match['text']}]({os.path.relpath(goal, PurePosixPath(page).parent)}{match['anchor'] or ''})"
    if address:
        return f"[{match['text']}]({address}/{'tree' if (ROOT / place).is_dir() else 'blob'}/main/{place}{match['anchor'] or ''})"
    return match["text"] if "`" in match["text"] or "/" in match["text"] else f"{match['text']} (`{place}`)"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
