# SPDX-License-Identifier: Apache-2.0
"""Folders that are made once for all workers."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


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
