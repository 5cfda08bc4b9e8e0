# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/extend do what they say: their blocks, applied to a copy, pass the suite."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = "\n".join((ROOT / "docs" / "extend" / f"{name}.md").read_text() for name in ("op", "backend", "rule"))
# What a copy needs: sources, tests, and the files that tests of the architecture and of the site read.
COPIED = (
    "packages", "tests", "docs", "benchmarks", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md",
    "constraints.txt", "mkdocs.yml", "pyproject.toml", "noxfile.py",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.cpu]


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """(language, path, text) of every block that begins with the path of its file."""
    yield from re.findall(r"^```(\w+)\n# (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def changed(source: str, diff: str) -> str:
    """A source with the changes of a diff, each behind the line above it; what a change replaces occurs once."""
    hunks: list[tuple[list[str], list[str]]] = [([], [])]
    for line in diff.splitlines():
        mark, text = line[:1], f"{line[1:]}\n"
        if mark == " ":
            hunks.append(([text], [text]))
        else:
            hunks[-1][mark == "+"].append(text)
    for old, new in hunks:
        if old != new:
            assert source.count("".join(old)) == 1, old
            source = source.replace("".join(old), "".join(new))
    return source


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with what the page adds to it."""
    folder = tmp_path_factory.mktemp("repository")
    for name in COPIED:
        source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", "*.egg-info", ".pytest_cache")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    for language, path, text in blocks(PAGE):
        target = folder / path
        if language == "diff":
            target.write_text(changed(target.read_text(), text))
        elif path.startswith(("packages/", "tests/")):
            target.parent.mkdir(exist_ok=True)
            target.write_text(f"{target.read_text()}\n\n{text}" if target.exists() else text)
    return folder


def installed(name: str, folder: Path) -> Path:
    """The package of the page that its pyproject.toml gives this name, as pip would install it."""
    given = list(blocks(PAGE))
    projects = (tomllib.loads(text)["project"] for language, _, text in given if language == "toml")
    project = next(project for project in projects if project["name"] == name)
    metadata = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
    points = "".join(f"{key} = {value}\n" for key, value in project["entry-points"]["liger"].items())
    (metadata / "entry_points.txt").write_text(f"[liger]\n{points}")
    for _, path, text in given:
        if path.startswith(f"{name.replace('-', '_')}/"):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
    return folder


def run(*arguments: str, inside: Path = ROOT, site: Path | None = None) -> str:
    """What Python prints in a fresh process, with the sources of a repository and perhaps with a package installed."""
    sources = [str(path) for path in sorted((inside / "packages").glob("*/src"))]
    path = os.pathsep.join([*([str(site)] if site else []), *sources])
    variables = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    # As a worker, it would share files with other runs.
    for name in ("LIGER_BACKEND", "PYTEST_XDIST_WORKER"):
        variables.pop(name, None)
    done = subprocess.run([sys.executable, *arguments], cwd=inside, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def passes(*arguments: str, inside: Path = ROOT, site: Path | None = None) -> int:
    """The number of tests that pass; none may fail."""
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cpu"]
    printed = run(*options, *arguments, inside=inside, site=site)
    return int(re.findall(r"^(\d+) passed", printed, re.MULTILINE)[-1])


def test_the_op_of_the_page_passes_the_suite_and_needs_nothing_else(copy: Path) -> None:
    cubed = "cubed and (float32 or derivative or sentence or formula or drawn or random)"
    rest = "an_op_is_found or public or file or eager or sentence or columns or absent or without_a_head"
    where = ("conformance", "fuzz", "test_architecture.py", "bench/test_peers.py", "hf/test_sweep.py")
    chosen = [*(f"tests/{path}" for path in where), "--backend", "reference", "-k", f"({cubed}) or {rest}"]
    assert passes(*chosen, inside=copy) > 60


def test_the_op_of_the_page_gets_its_page_on_the_site(copy: Path) -> None:
    generators = ("tests/docs/test_site.py", "tests/docs/test_benchmarks.py")
    assert passes(*generators, "-k", "every_op_has_a_page or committed_results or mistakes", inside=copy) == 4


def test_the_op_of_the_page_passes_the_suite_by_triton(copy: Path) -> None:
    pytest.importorskip("triton")
    assert passes("tests/conformance", "--backend", "triton", "-k", "cubed and float32", inside=copy) > 20


MODEL = """
import sys
import torch
import liger_hf
from liger_core.commands import main

class Layer(torch.nn.Module):
    doubles = True

    def __init__(self, formula):
        super().__init__()
        self.formula = formula

    def forward(self, x):
        return self.formula(x)

for formula in FORMULAS:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Layer(formula))
    x = torch.randn(2, 8)
    before = model(x)
    try:
        report = liger_hf.apply(model, only=["OP"])
        print(report.replaced, report.rows[0].reason)
    except liger_hf.ModelError as problem:
        print(problem)
    torch.testing.assert_close(model(x), before)
sys.argv = ["liger", "ops"]
main()
"""


def test_the_rule_of_the_page_reaches_a_model(copy: Path) -> None:
    model = MODEL.replace("FORMULAS", "(lambda x: x**3, lambda x: x**2)").replace("OP", "cubed")
    printed = run("-c", model, inside=copy)
    replaced, absent, *ops = printed.splitlines()
    assert replaced == "{'cubed': 1} outputs and gradients agree"
    assert absent.endswith("cubed: no module without weights maps x to x³")
    assert any("cubed" in line for line in ops)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_the_backend_of_the_page_passes_the_suite(tmp_path: Path) -> None:
    site = installed("liger-compiled", tmp_path)
    assert "compiled" in run("-c", "from liger_core.commands import main; main()", "doctor", site=site)
    (command,) = re.findall(r"^python (-m pytest tests/conformance .*--backend compiled)$", PAGE, re.MULTILINE)
    chosen = "geglu and ((float32 and one_block and accurate) or test_transforms or signature)"
    assert passes(*command.split()[2:], "-k", chosen, site=site) >= 2


def test_an_op_and_a_rule_of_another_package_pass_the_suite_and_reach_a_model(tmp_path: Path) -> None:
    site = installed("liger-doubled", tmp_path)
    assert passes("tests/conformance", "--backend", "reference", "-k", "doubled", site=site) > 10
    printed = run("-c", MODEL.replace("FORMULAS", "(lambda x: 2 * x,)").replace("OP", "doubled"), site=site)
    assert printed.startswith("{'doubled': 1} outputs and gradients agree\n")
