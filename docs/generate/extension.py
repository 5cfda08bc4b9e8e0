# SPDX-License-Identifier: Apache-2.0
"""The extension of Griffe by which the API reference shows docstrings as Markdown."""

import sys
from pathlib import Path
from typing import Any

import griffe

# Griffe loads this file by its path.
sys.path.insert(0, str(Path(__file__).parent))

from docstrings import markdown


class AlignedRows(griffe.Extension):
    """Every docstring of the API reference, made Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        known = (
            [parameter.name for parameter in obj.parameters] if isinstance(obj, griffe.Function) else list(obj.members)
        )
        obj.docstring.value = markdown(obj.docstring.value, known)
