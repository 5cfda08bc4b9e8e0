# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: the entry `folder/*` of the navigation is the folder's index.md and the pages that it links to, in that order.

So a new op, command or module of the API needs no line in mkdocs.yml.
"""

import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    config.nav = filled(config.nav, Path(config.docs_dir))
    return config


def filled(nav: list[Any], docs: Path) -> list[Any]:
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            entries.append({title: filled(inner, docs) if isinstance(inner, list) else inner})
        elif entry.endswith("/*"):
            entries += _folder(entry.removesuffix("/*"), docs)
        else:
            entries.append(entry)
    return entries


def _folder(name: str, docs: Path) -> list[str]:
    linked = re.findall(r"\]\(([\w.-]+\.md)\)", (docs / name / "index.md").read_text())
    return [f"{name}/index.md", *(f"{name}/{page}" for page in dict.fromkeys(linked))]
