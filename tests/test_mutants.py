# SPDX-License-Identifier: Apache-2.0
"""The planted bugs: each can be planted in the sources of today, and its test is there."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from mutant import Mutant  # noqa: E402
from planted import MUTANTS  # noqa: E402

SOURCE = """
class Loss:
    def forward(self, x):  # a comment
        y = self.scaled(
            x, by=2.0,
        )
        if y is not None and x.ready():
            self.keep(y)
        return y + 1.0
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_can_be_planted_and_its_test_is_there(mutant: Mutant) -> None:
    (source,) = ROOT.glob(f"packages/*/src/{mutant.file}")
    text = source.read_text()
    file, _, test = mutant.test.partition("::")

    planted = mutant.planted(text)
    compile(planted, mutant.file, "exec")
    assert planted != ast.unparse(ast.parse(text))
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_planted_bugs_are_few_and_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) <= 80


@pytest.mark.parametrize(
    ("old", "new", "planted"),
    [
        ("self.scaled(_1, by=_2)", "_1", "y = x"),
        ("self.keep(_1)", "pass", "        pass"),
        ("_1 is not None and _2", "False", "if False:"),
        ("return _1 + 1.0", "z = _1\nreturn z", "z = y\n        return z"),
        ("by=2.0", "by=3.0", None),
        ("self.scaled(_1, by=_1)", "_1", None),
        ("_1.ready()", "_1.missing()", "x.missing()"),
        ("self", "other", None),
    ],
)
def test_a_pattern_is_replaced_where_it_occurs_once(old: str, new: str, planted: str | None) -> None:
    mutant = Mutant("a bug", "a:Loss.forward", old, new, "")
    if planted is None:
        with pytest.raises(LookupError, match=r"must occur once in a:Loss\.forward"):
            mutant.planted(SOURCE)
    else:
        assert planted in mutant.planted(SOURCE)


def test_a_function_that_is_gone_is_named() -> None:
    with pytest.raises(LookupError, match=r"a:Loss\.backward must name one function, it names 0"):
        Mutant("a bug", "a:Loss.backward", "x", "y", "").planted(SOURCE)
