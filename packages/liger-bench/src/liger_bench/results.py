# SPDX-License-Identifier: Apache-2.0
"""Files of rows that grow from run to run."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_core.errors import OptionError

Columns = dict[str, Any]


def read_json(path: Path) -> list[Columns]:
    """The rows of a file; none if there is no file.

    Raises OptionError if it holds something else.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text())
    except ValueError as error:
        raise OptionError(f"bench: {path} must be JSON, got {error}; move it away or give another folder") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise OptionError(f"bench: {path} must hold a list of rows, got {type(rows).__name__}; move it away or give another folder")
    return rows


def append_json(rows: Sequence[Columns], path: Path) -> None:
    """Add rows to the list in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(json.dumps([*read_json(path), *rows], indent=1) + "\n")
    # Only a complete file takes the place of the old one.
    written.replace(path)


def check_csv(path: Path, header: list[str]) -> None:
    """Raise OptionError if rows of these columns cannot be appended there, since they would then mean something else."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open(newline="") as file:
        found = next(csv.reader(file))
    if found != header:
        raise OptionError(
            f"bench: {path} must have the columns of this version to be appended to, got {','.join(found)[:200]}; give another file"
        )


def append_csv(rows: Sequence[Columns], path: Path, header: list[str]) -> None:
    """Add rows to a file, which gets its header when it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_csv(path, header)
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, header)
        if new:
            writer.writeheader()
        writer.writerows(rows)
