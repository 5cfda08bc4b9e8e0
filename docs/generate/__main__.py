# SPDX-License-Identifier: Apache-2.0
"""Makes the source of the site: `python docs/generate build/docs` copies docs/, adds the generated pages and the pages from the root.

Then any generator that reads mkdocs.yml can build it. What is generated is not in the repository, so it cannot be stale.
"""

import os.path
import re
import shutil
import sys
from pathlib import Path, PurePosixPath

import all_ops
import benchmarks
import commands
import fits
import python

import ops
from liger_train.plan.fit import FILES, script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Files outside docs/ that are pages of the site.
FROM_ROOT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    **{
        f"packages/{path.parent.name}/README.md": f"packages/{path.parent.name}.md"
        for path in sorted(ROOT.glob("packages/*/README.md"))
    },
}
# Where a link in the repository leads on the site. An op is described in its file, a list of all ops is in the README of liger-core.
MOVED = {
    "examples/README.md": "how-to/index.md",
    **FROM_ROOT,
    "packages/liger-core/README.md#ops": "reference/ops/index.md",
    **{f"packages/liger-core/src/liger_core/ops/{op.name}.py": f"reference/ops/{op.name}.md" for op in ops.ops()},
}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\(<?(?P<target>[^()\s<>#]+)(?P<anchor>#[^()\s<>]*)?>?\)")
CODE = re.compile(r"(^ *```.*?^ *```$)", flags=re.DOTALL | re.MULTILINE)


def main(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(DOCS, target, ignore=shutil.ignore_patterns("generate", "__pycache__"))
    address = repository()
    for page, text in pages().items():
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        (target / page).write_text(text)
    for name, text in assets().items():
        (target / "fit").mkdir(exist_ok=True)
        (target / "fit" / name).write_text(text)
    sources = {page: source for source, page in FROM_ROOT.items()}
    for path in target.rglob("*.md"):
        page = path.relative_to(target).as_posix()
        source = PurePosixPath(sources.get(page, f"docs/{page}"))
        path.write_text(with_links(path.read_text(), source, page, address))


def pages() -> dict[str, str]:
    """Path on the site → text of every page that is not in docs/."""
    found = {page: (ROOT / source).read_text() for source, page in FROM_ROOT.items()}
    # The section of the home page has no other page to navigate to.
    found["index.md"] = "---\nhide: [navigation]\n---\n\n" + found["index.md"]
    found |= {f"reference/ops/{name}.md": text for name, text in ops.pages().items()}
    found |= {f"reference/commands/{name}.md": text for name, text in commands.pages().items()}
    # These are in the repository, too, where tests/docs says when they are stale.
    found |= {page.PAGE.relative_to(DOCS).as_posix(): page.page() for page in (benchmarks, all_ops)}
    found |= {f"reference/python/{name}.md": text for name, text in python.pages().items()}
    return found


def assets() -> dict[str, str]:
    """Name → text of the files beside the page that answers whether a setup fits."""
    return {"data.js": script(fits.read()), **{name: (FILES / name).read_text() for name in ("fit.css", "fit.js")}}


def repository() -> str:
    """The address of the repository, if mkdocs.yml has one."""
    line = re.search(r"^repo_url: *(\S+)", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    return line[1].rstrip("/") if line else ""


def with_links(text: str, source: PurePosixPath, page: str, address: str) -> str:
    """Links are written for the repository. Those that leave the site lead to its address; without one they are text."""

    def change(match: re.Match[str]) -> str:
        return link(match, source, page, address)

    # Every second part is a block of code.
    return "".join(part if index % 2 else LINK.sub(change, part) for index, part in enumerate(CODE.split(text)))


def link(match: re.Match[str], source: PurePosixPath, page: str, address: str) -> str:
    place = os.path.normpath(source.parent / match["target"])
    if re.match(r"[a-z]+:", match["target"]) or place.startswith("..") or not (ROOT / place).exists():
        return match[0]
    anchor = match["anchor"] or ""
    goal, anchor = (MOVED[place + anchor], "") if place + anchor in MOVED else (MOVED.get(place), anchor)
    if goal is None and place.startswith("docs/"):
        goal = place.removeprefix("docs/")
    if goal is not None and not (ROOT / place).is_dir():
        return f"{match['image']}[{match['text']}]({os.path.relpath(goal, PurePosixPath(page).parent)}{anchor})"
    if address:
        return f"[{match['text']}]({address}/{'tree' if (ROOT / place).is_dir() else 'blob'}/main/{place}{anchor})"
    return match["text"] if "`" in match["text"] or "/" in match["text"] else f"{match['text']} (`{place}`)"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
