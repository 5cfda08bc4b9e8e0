# SPDX-License-Identifier: Apache-2.0
"""Check the folders and files that a command will write to, before it loads anything."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from liger_core.errors import OptionError


def check_folder(option: str, folder: Path) -> None:
    """Create the folder if necessary, and raise OptionError if no file can be written there."""
    with _refused(option, "folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions do not show it: root has all of them, but cannot write to a read-only mount or to /proc.
        with tempfile.TemporaryFile(dir=folder):
            pass


def check_file(option: str, path: Path) -> None:
    """Create the file's folder if necessary, and raise OptionError if the file cannot be written."""
    with _refused(option, "file", path):
        if path.is_symlink() or path.exists():
            with path.open("ab"):
                pass
        if is_device(path):
            return
    # A new file replaces the old one.
    check_folder(option, path.resolve().parent)


def is_device(path: Path) -> bool:
    """Return whether a path is a device or a pipe, such as /dev/null or /dev/stdout."""
    return path.exists() and not path.is_file()


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
