# SPDX-License-Identifier: Apache-2.0
"""Files of rows that grow from run to run, and that full disks, killed runs and concurrent runs cannot corrupt."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout
from rich.console import Console

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
    # One fixed name, so leftovers of killed runs do not accumulate; the lock lets one process write at a time.
    written = path.with_name(path.name + ".part")
    with _alone(path), _writable(path):
        everything = json.dumps([*read_json(path), *rows], indent=1) + "\n"
        try:
            with written.open("w") as file:
                file.write(everything)
                _reach_the_disk(file)
            # Only a complete file replaces the old one.
            written.replace(path)
        except BaseException:
            written.unlink(missing_ok=True)
            raise


def check_csv(path: Path, header: list[str]) -> None:
    """Raise OptionError if the file has other columns, so rows cannot be appended.

    If a killed run cut off the last line, it is repaired, with a message on standard error.
    """
    if path.exists():
        with _alone(path):
            _mended(path, header)


def append_csv(rows: Sequence[Columns], path: Path, header: list[str]) -> None:
    """Append rows to a file, with a header if it is new; items of a list are separated by spaces.

    A file with the same columns in another order, as written by an older version, keeps its order.

    Raises OptionError if they cannot be written; earlier rows are then unchanged.
    """
    with _alone(path), _writable(path):
        header = _mended(path, header)
        before = path.stat().st_size if path.is_file() else 0
        text = io.StringIO()
        writer = csv.DictWriter(text, header)
        if before == 0:
            writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                file.write(text.getvalue())
                _reach_the_disk(file)
        except BaseException:
            _cut(path, before)
            raise


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _reach_the_disk(file: IO[str]) -> None:
    """Flush a file to the disk; a full disk may raise its error only here."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock the folder of a file within this context, and create the folder if necessary."""
    if path.exists() and not path.is_file():
        # A device such as /dev/null has no rows.
        yield
        return
    with ExitStack() as stack:
        with _writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(path.parent / LOCK, timeout=PATIENCE))
            except Timeout:
                raise OptionError(
                    f"results: {path} must not be locked by another process for longer than {PATIENCE:.0f} s; wait or "
                    "give another folder"
                ) from None
        yield


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"results: {path} must be a file that can be written, got {error.strerror or error}; the rows that it had "
            "are unchanged; make room or give another folder"
        ) from error


def _mended(path: Path, header: list[str]) -> list[str]:
    """Repair a last line that was cut off, then return the columns of the file in its order."""
    # The file may be cut within a character.
    text = path.read_bytes().decode(errors="surrogateescape") if path.is_file() else ""
    if not text:
        return header
    columns = next(csv.reader(io.StringIO(text, newline="")))
    header = columns if sorted(columns) == sorted(header) else header
    with _writable(path):
        mended = _mend(path, text, header)
    if mended:
        Console(stderr=True).print(mended, markup=False, highlight=False, soft_wrap=True)
    return header


def _cut(path: Path, size: int) -> None:
    if not path.is_file() or path.stat().st_size <= size:
        return
    if size == 0:
        path.unlink()
    else:
        os.truncate(path, size)


def _mend(path: Path, text: str, header: list[str]) -> str | None:
    """Complete the last line, or move it to a separate file if it lacks cells; return a sentence about it, or None."""
    whole = io.StringIO()
    csv.writer(whole).writerow(header)
    if whole.getvalue().startswith(text) and text != whole.getvalue():
        # The run was killed while it wrote the header.
        _cut(path, 0)
        return None
    columns = next(csv.reader(io.StringIO(text, newline="")))
    if columns != header:
        raise OptionError(
            f"results: {path} must have the columns of this version to be appended to, got {','.join(columns)[:200]}; "
            "give another file"
        )
    start, last = _last_record(text)
    if len(last) >= len(header):
        if text.endswith("\n"):
            return None
        with path.open("ab") as file:
            # The cut may have left the first half of the line ending.
            file.write(b"\n" if text.endswith("\r") else b"\r\n")
        return f"{path}: the last line had no end and was given one; its last cell, {last[-1]!r}, may be cut short"
    rows, rest = (half.encode(errors="surrogateescape") for half in (text[:start], text[start:]))
    torn = path.with_suffix(path.suffix + ".torn")
    with torn.open("ab") as file:
        file.write(rest + b"\n")
    os.truncate(path, len(rows))
    return f"{path}: the last line was cut off; it was moved to {torn}, and the rows before it are unchanged"


def _last_record(text: str) -> tuple[int, list[str]]:
    """Return the offset of the last row and its cells, or no cells if it ends within quotes.

    Cells may contain line breaks.
    """
    lines = io.StringIO(text, newline="").readlines()
    reader = csv.reader(lines, strict=True)
    start, end = 0, 0
    record: list[str] = []
    try:
        for cells in reader:
            if cells:
                start, record = end, cells
            end = reader.line_num
    except csv.Error:
        start, record = end, []
    return sum(map(len, lines[:start])), record
