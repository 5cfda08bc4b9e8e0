# SPDX-License-Identifier: Apache-2.0
"""Files of rows that grow from run to run, and that full disks, killed runs and concurrent runs cannot corrupt."""

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from liger_bench.writable import is_device
from liger_core.errors import OptionError

# In the folder of the files. Never removed, because waiting processes would then lock different files of this name.
LOCK = ".liger.lock"
# Seconds; an append takes milliseconds.
PATIENCE = 60.0

Columns = dict[str, Any]


def read_json(path: Path) -> list[Columns]:
    """Return the rows of a file, or none if there is no file.

    Raises OptionError if the file holds anything else.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"results: {path} must be JSON, got {reason}; move it away or give another folder") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise OptionError(
            f"results: {path} must hold a list of rows, got {type(rows).__name__}; move it away or give another folder"
        )
    return rows


def append_json(rows: Sequence[Columns], path: Path) -> None:
    """Add rows to the list in a file.

    Raises OptionError if they cannot be written; earlier rows are then unchanged.
    """
    path = _target(path)
    with _alone(path):
        _replace(path, json.dumps([*read_json(path), *rows], indent=1) + "\n")


def check_csv(path: Path, header: list[str]) -> None:
    """Raise OptionError if the file has other columns, so rows cannot be appended."""
    _table(path, header)


def append_csv(rows: Sequence[Columns], path: Path, header: list[str]) -> None:
    """Append rows to a file, with a header if it is new; items of a list are separated by spaces.

    A file with the same columns in another order, as written by an older version, keeps its order.

    Raises OptionError if they cannot be written; earlier rows are then unchanged.
    """
    path = _target(path)
    with _alone(path):
        before, header = _table(path, header)
        text = io.StringIO()
        writer = csv.DictWriter(text, header)
        if not before:
            writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
        _replace(path, before + text.getvalue())


def _table(path: Path, header: list[str]) -> tuple[str, list[str]]:
    """Return the text of a table, and its columns in the order of the file."""
    try:
        text = path.read_bytes().decode() if path.is_file() else ""
        records = [cells for cells in csv.reader(io.StringIO(text, newline=""), strict=True) if cells]
        if records and len(records[-1]) != len(records[0]):
            raise csv.Error(f"a last row of {len(records[-1])} cells")
    except (UnicodeDecodeError, csv.Error) as error:
        raise OptionError(
            f"results: {path} must be a table of whole rows in UTF-8, got {error}; mend it or give another file"
        ) from None
    if not records:
        return "", header
    columns = records[0]
    if sorted(columns) != sorted(header):
        raise OptionError(
            f"results: {path} must have the columns of this version to be appended to, got {','.join(columns)[:200]}; "
            "give another file"
        )
    return text if text.endswith("\n") else f"{text}\r\n", columns


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _target(path: Path) -> Path:
    """Return the file behind a link, so that all that write to it lock the same folder."""
    return path if is_device(path) else path.resolve()


def _replace(path: Path, text: str) -> None:
    """Replace a file with a complete one, so that neither a full disk nor a killed run leaves a partial file."""
    if is_device(path):
        path.write_text(text, encoding="utf-8")
        return
    # One fixed name, so leftovers of killed runs do not accumulate; the lock lets one process write at a time.
    written = path.with_name(path.name + ".part")
    try:
        with written.open("w", newline="", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # A full disk may raise its error only here.
            os.fsync(file.fileno())
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock the folder of a file within this context, which writes the file, and create the folder if necessary."""
    try:
        if is_device(path):
            yield
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / LOCK, timeout=PATIENCE):
            yield
    except Timeout:
        raise OptionError(
            f"results: {path} must not be locked by another process for longer than {PATIENCE:.0f} s; wait or give "
            "another folder"
        ) from None
    except OSError as error:
        raise OptionError(
            f"results: {path} must be a file that can be written, got {error.strerror or error}; the rows that it had "
            "are unchanged; make room or give another folder"
        ) from error
