# SPDX-License-Identifier: Apache-2.0
"""The modules of docs/generate, and folders that are made once for all workers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


class Generators:
    """The modules of docs/generate by their names."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def generators() -> Iterator[Generators]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "docs" / "generate")
        yield Generators()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """made_once(name, make): a folder that `make` fills in the first worker that needs it."""
    own = tmp_path_factory.getbasetemp()
    home = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        with FileLock(home / f"{name}.lock"):
            if not (home / name).exists():
                make(home / f"{name}.begun")
                (home / f"{name}.begun").rename(home / name)
        return home / name

    return folder
