# SPDX-License-Identifier: Apache-2.0
"""Every block of code on the site runs, or says why not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

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


WITH_CODE = [path for path in pages.pages() if any(block.runs for block in pages.blocks(path))]


@pytest.mark.matrix
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
