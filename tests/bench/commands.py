# SPDX-License-Identifier: Apache-2.0
"""The `liger` command, run as a user runs it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_bench.bench.limits import Limits

# A machine that takes as long as its operations or bytes say.
LIMITS = Limits(1e9, 1e9, lambda p: 2 * p.rows * p.inner * p.columns / 1e9, lambda size: size / 1e9)
InProcess = Callable[..., tuple[int, str]]
START = "from liger_core.commands import main; main()"
TWICE = f"""
try:
    {START}
except SystemExit:
    print("BETWEEN")
    main()
"""


def assert_refused(liger: InProcess, sentence: str, *words: str) -> None:
    """The command must end with 2, and say this sentence."""
    code, said = liger(*words)
    assert (code, sentence in said) == (2, True), said


def cells(text: str, *wanted: str) -> list[str]:
    """The cells of the first line of a table, in Markdown or on a terminal, that has all the wanted ones."""
    table = [line.strip(line[0]).split(line[0]) for line in text.splitlines() if line.startswith(("|", "│"))]
    return next(line for line in ([*map(str.strip, cells)] for cells in table) if set(wanted) <= set(line))


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
