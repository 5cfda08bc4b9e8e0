# SPDX-License-Identifier: Apache-2.0
"""The `liger` command, run as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

InProcess = Callable[..., tuple[int, str]]
START = "from liger_core.commands import main; main()"
TWICE = f"""
try:
    {START}
except SystemExit:
    print("BETWEEN")
    main()
"""


@dataclass(frozen=True)
class Finished:
    """A command that ended: its exit code, what it printed as JSON, and the folder that it wrote to."""

    code: int
    printed: str
    errors: str
    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.printed))
