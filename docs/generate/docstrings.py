# SPDX-License-Identifier: Apache-2.0
"""Docstrings as Markdown: the aligned rows *name  meaning* become tables; formulas stay code."""

import re
from collections.abc import Collection

from liger_bench import markdown as page
from liger_core.docstrings import parts


def markdown(docstring: str, known: Collection[str] = ()) -> str:
    """The docstring with a table instead of each paragraph of aligned rows."""
    return "\n\n".join(
        part
        if isinstance(part, str)
        else page.table(("name", "meaning"), [(code(*entry.names), cell(entry.text)) for entry in part])
        for part in parts(docstring, known)
    )


def cell(text: str) -> str:
    """Text for a cell of a table; columns of the docstring end a clause."""
    return re.sub(r"(?<=[^\s,;]) {2,}(?=\S)", ", ", text.strip())


def code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def filled(text: str, **tables: str) -> str:
    """A page with each table between the comments `<!-- name: begin -->` and `<!-- name: end -->`."""
    between = re.compile(r"(?P<begin><!-- (?P<name>\w+): begin -->\n).*?(?P<end><!-- (?P=name): end -->)", re.DOTALL)
    return between.sub(lambda found: f"{found['begin']}\n{tables[found['name']]}\n\n{found['end']}", text)
