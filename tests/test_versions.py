# SPDX-License-Identifier: Apache-2.0
"""Metadata allows the versions that are tested; outside of them one warning says so."""

import warnings
from collections.abc import Callable, Iterator
from importlib import metadata

import pytest

from liger_core import selection
from liger_core.versions import DEPENDED_ON, complaint, complaints, warn_if_untested

Versions = Callable[[str], None]


@pytest.fixture
def torch_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[Versions]:
    """torch_is(version), where >=2.11,<2.14 is required."""
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch<2.14,>=2.11", "rich>=13", 'torch==1; extra == "x"'])

    def installed(version: str) -> None:
        warn_if_untested.cache_clear()
        monkeypatch.setattr(metadata, "version", lambda name: version)

    yield installed
    warn_if_untested.cache_clear()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.1", "2.12.0a0+git123"])
def test_a_tested_version_needs_no_warning(version: str, torch_is: Versions) -> None:
    torch_is(version)
    assert complaint("liger-core") is None


@pytest.mark.parametrize("version", ["2.10.2", "2.14.0", "2.15.0.dev20261101+cu130", "3.0"])
def test_another_version_is_named_with_those_that_are_tested(version: str, torch_is: Versions) -> None:
    torch_is(version)
    assert complaint("liger-core") == f"Liger is tested with torch<2.14,>=2.11, got {version}"


def test_there_is_one_warning(torch_is: Versions) -> None:
    torch_is("2.15.0")
    sentence = r"Liger is tested with torch<2\.14,>=2\.11, got 2\.15\.0; install a tested version"
    with pytest.warns(UserWarning, match=sentence):
        warn_if_untested("liger-core")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("liger-core")


def test_loading_the_plugins_warns(torch_is: Versions, fresh_selection: None) -> None:
    torch_is("2.15.0")
    selection.reset()
    with pytest.warns(UserWarning, match="Liger is tested with torch"):
        selection.settle()


def test_a_library_that_is_not_installed_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert complaints() == []


def test_what_is_installed_here_is_tested() -> None:
    assert complaints() == []


@pytest.mark.parametrize("distribution", DEPENDED_ON)
def test_every_library_that_is_depended_on_is_bounded_on_both_sides(distribution: str) -> None:
    from test_architecture import metadata as project

    lines = map(str, project(distribution.replace("-", "_"))["dependencies"])  # type: ignore[call-overload]
    (found,) = [line for line in lines if line.startswith(DEPENDED_ON[distribution] + ">")]
    assert ">=" in found
    assert ",<" in found


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [("3.6.0", "2.3.5", True), ("3.6.0", "2.4.6", False), ("3.7.1", "2.4.6", True), ("3.9.0", "2.4.0", True)],
)
def test_an_interpreter_that_numpy_breaks_is_unavailable_and_says_why(triton: str, numpy: str, works: bool) -> None:
    from liger_triton.plugin import _interpreter_problem

    problem = _interpreter_problem(triton, numpy)
    said = (
        "the interpreter of Triton 3.6.0 cannot run loops with numpy 2.4.6; pip install 'numpy<2.4', or a newer Triton"
    )
    assert problem == (None if works else said)
