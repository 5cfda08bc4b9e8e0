# SPDX-License-Identifier: Apache-2.0
"""The source of the site, as docs/generate makes it, and pages that state facts about the code."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import typer.main

import liger_core
import liger_hf
from liger_core import commands, nn
from liger_core.builtin import CATALOGUE
from liger_core.plugins import registry

ROOT = Path(__file__).parents[2]
# A command line in a block; `…` stands for more options, and is not parsed.
COMMAND = re.compile(r"^ {0,4}(?:torchrun .* -m liger_core|liger) ([a-z][^#\n…]*)(?:#.*)?$", re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
CPU_TORCH = "https://download.pytorch.org/whl/cpu"

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def site(made_once: Callable[..., Path]) -> Path:
    return made_once("site", generate)


def generate(folder: Path) -> None:
    done = subprocess.run([sys.executable, "docs/generate", str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_op_has_a_page_with_its_arguments_and_every_tested_call(site: Path) -> None:
    for op in CATALOGUE:
        page = (site / "reference" / "ops" / f"{op.name}.md").read_text()
        for name in op.signature.parameters:
            assert f"`{name}`" in page, f"{op.name}: {name}"
        for sample in op.samples(torch.device("cpu"), torch.float32):
            assert f"| `{sample.name}` |" in page, f"{op.name}: {sample.name}"


@pytest.mark.parametrize("package", [liger_core, liger_hf, nn], ids=lambda package: str(package.__name__))
def test_every_public_function_and_class_has_a_place_in_the_reference(site: Path, package: object) -> None:
    page = (site / "reference" / "python" / f"{package.__name__}.md").read_text()  # type: ignore[attr-defined]
    ops = {op.name for op in CATALOGUE}
    # A marker of pluggy, which the recipes show.
    expected = {name for name in package.__all__ if name not in ops} - {"hookimpl"}  # type: ignore[attr-defined]
    assert {path.split(".")[-1] for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)} == expected


def test_a_link_between_pages_of_the_repository_leads_to_their_pages_on_the_site(site: Path) -> None:
    home = (site / "index.md").read_text()
    assert "![Peak memory of a training run, with and without Liger](images/memory.png)" in home
    assert "[architecture](project/architecture.md)" in home
    assert "[add an op or an option](../extend/op.md)" in (site / "project" / "contributing.md").read_text()
    assert "[op](reference/ops/linear_divergence.md)" in (site / "losses.md").read_text()
    assert "[Ops](../reference/ops/index.md)" in (site / "start" / "loop.md").read_text()


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_a_page_leads_somewhere_in_the_repository(page: Path) -> None:
    text = re.sub(r"<!--.*?-->|^ *```.*?^ *```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(<?([^()\s<>#]+)", text)
    targets = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("generator", ["compatibility", "loss_options", "techniques", "trainers"])
def test_the_tables_of_a_page_are_those_that_are_generated(generators: Any, generator: str) -> None:
    module = getattr(generators, generator)
    text = module.PAGE.read_text()
    assert module.filled(text) == text, f"run python docs/generate/{generator}.py"


def test_the_readme_has_the_figures_that_were_measured_last(generators: Any) -> None:
    text, steps = (ROOT / "README.md").read_text(), generators.steps
    assert generators.trainers.headline() in " ".join(text.split())
    (table,) = re.findall(r"\| --- \|[^\n]*\n((?:\|[^\n]*\n)+)", text)
    assert set(table.splitlines()) <= set(steps.readme(steps.measured(steps.read([steps.newest("steps")]))))


def parse(command: Any, name: str, arguments: list[str], parent: Any = None) -> None:
    context = command.make_context(name, list(arguments), parent=parent)
    rest = [*getattr(context, "_protected_args", []), *context.args]
    if rest and hasattr(command, "get_command"):
        inner = command.get_command(context, rest[0])
        assert inner is not None, f"no command {rest[0]}"
        parse(inner, rest[0], rest[1:], context)


@pytest.mark.parametrize("page", [page for page in PAGES if COMMAND.search(page.read_text())], ids=name)
def test_every_command_on_a_page_has_options_that_exist(page: Path) -> None:
    """Those that are not run, too: they are parsed, and nothing more."""
    app = typer.Typer()
    app.callback()(commands._options)
    commands._add_commands(app, registry())
    for line in COMMAND.findall(page.read_text().replace("\\\n", "")):
        for single in line.split("&& liger "):
            parse(typer.main.get_command(app), "liger", shlex.split(single.partition("&&")[0]))


def test_every_error_of_troubleshooting_has_the_words_of_the_code() -> None:
    """An example below a heading raises it in test_examples.py; for all of them, the code has the words between the
    values."""
    sources = "".join(path.read_text() for path in sorted(ROOT.glob("packages/*/src/**/*.py")))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### `(\w+Error): (.*)`$", page, re.MULTILINE)
    assert len(headings) >= 10
    for kind, sentence in headings:
        assert f"class {kind}" in sources
        words = max(re.split(r"…|'[^']*'|torch\.\w+|[\[\d(]+|: |, got |; ", sentence), key=len).strip()
        assert words in sources, f"{kind}: {words}"


def test_the_page_on_planning_states_the_accuracy_that_its_table_has() -> None:
    table = (ROOT / "docs" / "plan-accuracy.md").read_text()
    errors = [float(error) for error in re.findall(r"\| ([+-][\d.]+)% \|", table)]
    page = " ".join((ROOT / "docs" / "planning.md").read_text().split())
    peaks, exact, bound = re.findall(r"Of (\d+) peaks, (\d+) are predicted within ([\d.]+) %", page)[0]
    assert (len(errors), sum(abs(error) <= float(bound) for error in errors)) == (int(peaks), int(exact))
    fits = re.findall(r"correct for (\d+) of (\d+) setups", table)[0]
    assert re.findall(r"Whether a run fits is correct for all (\d+)", page) == [fits[0]]
    assert fits[0] == fits[1]


@pytest.mark.parametrize("page", ["README.md", "docs/start/install.md"])
def test_the_build_of_torch_for_the_cpu_is_one_that_liger_allows(page: str) -> None:
    project = tomllib.loads((ROOT / "packages" / "liger-core" / "pyproject.toml").read_text())["project"]
    (required,) = [line for line in project["dependencies"] if line.startswith("torch")]
    assert f"`pip install '{required}' --index-url {CPU_TORCH}`" in (ROOT / page).read_text()
