# SPDX-License-Identifier: Apache-2.0
"""Every block of code on the site runs, or says why not; the notebooks are their pages', and run."""

import ast
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sybil", reason="needs sybil, which `nox -s tests` installs")

from docs import hub, pages
from docs.setups import SETUPS


def name(path: Path) -> str:
    return path.relative_to(pages.ROOT).as_posix()


@pytest.fixture(scope="session")
def hub_folder(made_once: Callable[..., Path]) -> Path:
    return made_once("hub", hub.make)


@pytest.fixture
def run(
    tmp_path: Path, hub_folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, fresh_selection: None
) -> Iterator[pages.Run]:
    """A folder to work in, the models of the hub, and nothing left over from another page."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    with hub.in_place(hub_folder, monkeypatch):
        yield pages.Run(tmp_path, device.type, monkeypatch, SETUPS)
    for variable in set(os.environ) - set(before):
        del os.environ[variable]


# What docs/start/install.md installs at least: Liger's packages and what they require.
LIGER = ("liger-core", "liger-triton", "liger-hf")
PROJECTS = [tomllib.loads((pages.ROOT / "packages" / package / "pyproject.toml").read_text()) for package in LIGER]
REQUIRED = [line for project in PROJECTS for line in project["project"]["dependencies"]]
WITH_LIGER = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in REQUIRED}
WITH_CODE = [path for path in pages.pages() if any(block.runs for block in pages.blocks(path))]


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_CODE, ids=name)
def test_the_code_of_a_page_runs(path: Path, run: pages.Run) -> None:
    pages.run(path, run)
    if not run.ran:
        pytest.skip("; ".join(dict.fromkeys(run.left)))


@pytest.mark.parametrize("path", pages.pages(), ids=name)
def test_every_block_has_a_language(path: Path) -> None:
    assert [block.line for block in pages.blocks(path) if not block.language] == []


@pytest.mark.parametrize("path", WITH_CODE, ids=name)
def test_every_block_that_does_not_run_says_why(path: Path) -> None:
    assert [block.line for block in pages.blocks(path) if block.marks.get("not run") == ""] == []


def shown(path: Path) -> str:
    """What a reader sees of a page."""
    return re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)


def imported(path: Path) -> set[str]:
    """The libraries that the code of a page imports, other than Python's own and the page's files."""
    blocks = [block for block in pages.blocks(path) if block.language == "python" and "not run" not in block.marks]
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block.source))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    own = {block.title.removesuffix(".py") for block in blocks}
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - own


@pytest.mark.parametrize("path", WITH_CODE, ids=name)
def test_a_page_shows_how_to_install_what_it_needs_besides_liger(path: Path) -> None:
    named = re.findall(r"^<!-- needs: (.*) -->$", path.read_text(), re.MULTILINE)
    needed = {each for names in named for each in names.split(", ")} | imported(path)
    needed = {each for each in needed - WITH_LIGER if not each.startswith("liger")}
    installed = {word for words in re.findall(r"pip install ([\w -]+)", shown(path)) for word in words.split()}
    assert needed - installed == set()


@pytest.mark.parametrize(
    "path", [path for path in WITH_CODE if "setup: float32_on_the_cpu" in path.read_text()], ids=name
)
def test_a_page_with_a_trainer_of_trl_says_what_to_pass_without_a_gpu(path: Path) -> None:
    assert "`use_cpu=True, bf16=False`" in shown(path)


NOTEBOOKS = sorted((pages.ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_every_notebook_is_what_its_page_makes(generators: Any) -> None:
    pytest.importorskip("jupytext", reason="needs jupytext")
    made = {name: generators.notebooks.notebook(name) for name in generators.notebooks.SECTIONS}
    assert {path.stem: path.read_text() for path in NOTEBOOKS} == made, "run python docs/generate/notebooks.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_installs_liger_from_the_clone_first_and_shows_no_hidden_code(path: Path) -> None:
    _title, install, *rest = json.loads(path.read_text())["cells"]
    folders = [(path.parent / folder).resolve() for folder in re.findall(r" (\.\./\S+)", "".join(install["source"]))]
    assert folders == [pages.ROOT / "packages" / name for name in LIGER]
    assert not [cell for cell in rest if "assert " in "".join(cell["source"]) or cell.get("outputs")]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_a_notebook_runs(path: Path, run: pages.Run) -> None:
    for library in ("bitsandbytes", "peft", "trl"):
        pytest.importorskip(library, reason=f"needs {library}")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    SETUPS["float32_on_the_cpu"](run, namespace)
    _title, _install, *cells = json.loads(path.read_text())["cells"]
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        magic, _, text = source.partition("\n")
        if magic.startswith("%%writefile "):
            Path(magic.split()[1]).write_text(text)
        else:
            exec(compile(source, path.name, "exec"), namespace)
