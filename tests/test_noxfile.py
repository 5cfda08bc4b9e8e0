# SPDX-License-Identifier: Apache-2.0
"""`nox -s tests -- …` runs what its arguments select: each part of the tests gets the arguments that select the same in
it."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from liger_core.builtin import CATALOGUE

ROOT = Path(__file__).parents[1]
TRITON = ["tests/conformance", "tests/ops", "--backend", "triton"]

pytestmark = pytest.mark.cpu


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module noxfile, whose sessions do nothing: the environment of the tests has no nox."""
    for name in ("nox", "nox.command"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    # The noxfile removes it from the environment.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_arguments_a_part_is_run_as_a_whole(noxfile: ModuleType) -> None:
    assert noxfile.selected(TRITON, []) == TRITON


@pytest.mark.parametrize("path", ["tests/hf", "tests/ops/test_rope.py", "tests/test_nn.py::test_a[tests/b]"])
def test_a_path_replaces_the_folder_that_it_is_in(path: str, noxfile: ModuleType) -> None:
    assert noxfile.selected(["tests", "--device", "cuda"], [path]) == [path, "--device", "cuda"]


def test_several_paths_replace_those_of_the_part_that_has_them(noxfile: ModuleType) -> None:
    selected = noxfile.selected(TRITON, ["tests/hf", "tests/ops/test_rope.py"])
    assert selected == ["tests/ops/test_rope.py", "--backend", "triton"]


def test_a_part_without_any_of_the_paths_is_skipped(noxfile: ModuleType) -> None:
    assert noxfile.selected(TRITON, ["tests/hf", "-k", "rope"]) == []


def test_a_folder_around_the_paths_of_a_part_selects_them(noxfile: ModuleType) -> None:
    assert noxfile.selected(TRITON, ["tests"]) == TRITON
    assert noxfile.selected(TRITON, ["tests/ops"]) == ["tests/ops", "--backend", "triton"]


@pytest.mark.parametrize(
    ("arguments", "posargs", "expression"),
    [
        pytest.param([], ["-k", "rope"], "(rope)", id="only_in_posargs"),
        pytest.param(["-k", "a or b"], [], "(a or b)", id="only_in_the_part"),
        pytest.param(["-k", "a or b"], ["-k", "c or d"], "(a or b) and (c or d)", id="in_both"),
        pytest.param(["-k", "a"], ["-kb"], "(a) and (b)", id="in_one_word"),
        pytest.param([], ["-k", "docs"], "(docs)", id="the_name_of_a_folder"),
    ],
)
def test_keywords_narrow_those_of_the_part(
    arguments: list[str], posargs: list[str], expression: str, noxfile: ModuleType
) -> None:
    assert noxfile.selected(["tests", *arguments], posargs) == ["tests", "-k", expression]


def test_the_values_of_other_options_are_not_paths(noxfile: ModuleType) -> None:
    options = ["--share", "1/4", "-n", "0", "-x", "--seed=7"]
    assert noxfile.selected(["tests/ops"], options) == ["tests/ops", *options]


def test_a_path_that_does_not_exist_reaches_pytest(noxfile: ModuleType) -> None:
    """It is an error of pytest, which names it."""
    assert noxfile.selected(["tests"], ["tests/no_such_folder"]) == ["tests", "tests/no_such_folder"]


def test_pip_and_uv_install_every_package_of_the_repository(noxfile: ModuleType) -> None:
    packages = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
    assert sorted(noxfile.PACKAGES) == packages
    sources = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["sources"]
    assert sources == {package.name: {"workspace": True} for package in packages}


def test_the_page_of_ops_measures_every_op(noxfile: ModuleType) -> None:
    names = {op.name: {workload.name for workload in op.workloads()} for op in CATALOGUE}
    assert [op for op, known in names.items() if not known & set(noxfile.WORKLOADS)] == []
    assert set(noxfile.WORKLOADS) - set().union(*names.values()) == set()
