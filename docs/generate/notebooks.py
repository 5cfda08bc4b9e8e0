# SPDX-License-Identifier: Apache-2.0
"""The recipes as notebooks: `python docs/generate/notebooks.py` writes examples/notebooks from docs/how-to.

A notebook has one section of its page, and no outputs. Its first cell has the installation that the page describes.
"""

import os.path
import re
from pathlib import Path

import jupytext

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
# Page → the heading of its section; without one, the text before the first heading below the title.
SECTIONS = {"qlora": "", "dpo": "", "grpo": "", "moe": "In 4 bits"}
PACKAGES = " ".join(f"../../packages/liger-{name}" for name in ("core", "triton", "hf"))
INSTALL = re.compile(r"Install\s\[Liger\]\([^)]*\),\sthen\s`pip\sinstall\s([^`]*)`,\sor\s\[open\s[^\]]*\]\([^)]*\)\.\s")
BEGINNING = """# {title}

Run this notebook from a clone of the repository, on a machine with an NVIDIA GPU. Rented machines usually come with
PyTorch. The first cell installs the rest. The page [{recipe}]({page}) says more.

```python
%pip install --quiet {packages}
```
{text}"""
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def notebook(name: str) -> str:
    """Return the notebook of a page, as text."""
    page = ROOT / "docs" / "how-to" / f"{name}.md"
    recipe, _, text = re.sub(r"<!--.*?-->\n*", "", page.read_text(), flags=re.DOTALL).partition("\n")
    recipe = title = recipe.removeprefix("# ")
    if section := SECTIONS[name]:
        text = text.partition(f"\n## {section}\n")[2]
        title = f"{recipe} {section[0].lower()}{section[1:]}"
    text = re.split(r"^##+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    (libraries,) = INSTALL.findall(text)
    text = re.sub(r'^```json title="(.*)"$', r"```python\n%%writefile \1", INSTALL.sub("", text), flags=re.MULTILINE)
    text = re.sub(r"\]\((?=[\w./-]+\.md)", f"]({os.path.relpath(page.parent, FOLDER)}/", text)
    where, packages = os.path.relpath(page, FOLDER), f"{PACKAGES} {libraries}"
    text = BEGINNING.format(title=title, recipe=recipe, page=where, packages=packages, text=text.rstrip())
    made = jupytext.reads(text, "md")
    made.metadata = METADATA
    for number, cell in enumerate(made.cells):
        # jupytext makes random ids and counts blank lines.
        cell.id, cell.metadata = str(number), {}
    return jupytext.writes(made, "ipynb")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in SECTIONS:
        (FOLDER / f"{name}.ipynb").write_text(notebook(name))
