# SPDX-License-Identifier: Apache-2.0
"""`nox -s tests -- …` runs what its arguments select: each part of the tests gets the arguments that select the same in
it."""

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


OPTIONS = ["--share", "1/4", "-n", "0", "-x", "--seed=7"]
# The arguments of a part, those of the user, and what is run.
SELECTED: dict[str, tuple[list[str], list[str], list[str]]] = {
    "no_arguments": (TRITON, [], TRITON),
    "a_path_replaces_the_folder_that_it_is_in": (["tests", "--device", "cuda"], ["tests/hf"], ["tests/hf", "--device", "cuda"]),
    "a_test_with_a_slash": (["tests"], ["tests/test_nn.py::test_a[tests/b]"], ["tests/test_nn.py::test_a[tests/b]"]),
    "the_part_that_has_the_path": (TRITON, ["tests/hf", "tests/ops/test_rope.py"], ["tests/ops/test_rope.py", "--backend", "triton"]),
    "a_part_without_any_of_the_paths_is_skipped": (TRITON, ["tests/hf", "-k", "rope"], []),
    "a_folder_around_the_paths": (TRITON, ["tests"], TRITON),
    "one_of_the_paths": (TRITON, ["tests/ops"], ["tests/ops", "--backend", "triton"]),
    "keywords_of_the_user": (["tests"], ["-k", "rope"], ["tests", "-k", "(rope)"]),
    "keywords_of_the_part": (["tests", "-k", "a or b"], [], ["tests", "-k", "(a or b)"]),
    "keywords_of_both": (["tests", "-k", "a or b"], ["-k", "c or d"], ["tests", "-k", "(a or b) and (c or d)"]),
    "keywords_in_one_word": (["tests", "-k", "a"], ["-kb"], ["tests", "-k", "(a) and (b)"]),
    "a_keyword_that_is_a_folder": (["tests"], ["-k", "docs"], ["tests", "-k", "(docs)"]),
    "values_of_other_options_are_not_paths": (["tests/ops"], OPTIONS, ["tests/ops", *OPTIONS]),
    "a_path_that_does_not_exist_reaches_pytest": (["tests"], ["tests/no_such_folder"], ["tests", "tests/no_such_folder"]),
}  # fmt: skip


@pytest.mark.parametrize(("part", "posargs", "expected"), SELECTED.values(), ids=SELECTED)
def test_what_the_arguments_select(
    part: list[str], posargs: list[str], expected: list[str], noxfile: ModuleType
) -> None:
    assert noxfile.selected(part, posargs) == expected


def test_pip_and_uv_install_every_package_of_the_repository(noxfile: ModuleType) -> None:
    packages = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
    assert sorted(noxfile.PACKAGES) == packages
    sources = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["sources"]
    assert sources == {package.name: {"workspace": True} for package in packages}


def test_the_page_of_ops_measures_every_op(noxfile: ModuleType) -> None:
    names = {op.name: {workload.name for workload in op.workloads()} for op in CATALOGUE}
    assert [op for op, known in names.items() if not known & set(noxfile.WORKLOADS)] == []
    assert set(noxfile.WORKLOADS) - set().union(*names.values()) == set()
