# SPDX-License-Identifier: Apache-2.0
"""Folders and files that a command will write to: checked before anything is loaded, and locked against other processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from liger_core.errors import OptionError

# In the folder that it locks. Never removed: processes that wait for it would end up with different files of this name.
LOCK = ".liger.lock"


def check_folder(option: str, folder: Path) -> None:
    """Raise OptionError unless files can be made in that folder, which is made if it is not there."""
    with _refused(option, "folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Only trying tells: root has every permission, and still cannot write to a read-only mount or to /proc.
        with tempfile.TemporaryFile(dir=folder):
            pass


def check_file(option: str, path: Path) -> None:
    """Raise OptionError unless that file can be written to; nothing is written, but its folder is made if it is not there."""
    with _refused(option, "file", path):
        if path.is_symlink() or path.exists():
            with path.open("ab"):
                return
    check_folder(option, path.parent)


@contextmanager
def locked(folder: Path, seconds: float) -> Iterator[Path]:
    """Keep out other processes that lock this folder, after waiting for them so long; gives the file of the lock.

    Raises filelock.Timeout. The lock is the operating system's, so it ends with the process, however that ends.
    """
    file = folder / LOCK
    with FileLock(file, timeout=seconds):
        yield file


@contextmanager
def _refused(option: str, kind: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if path.is_symlink() and not path.exists():
            reason = f"a link to {path.readlink()}, which is not there"
        else:
            reason = error.strerror or type(error).__name__
        raise OptionError(f"{option} must be a {kind} that can be written to, got {path}: {reason}") from error
