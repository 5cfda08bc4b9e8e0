# SPDX-License-Identifier: Apache-2.0
"""The planted bugs: each can be planted in the sources of today, and its test is there."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from mutant import Mutant  # noqa: E402
from planted import MUTANTS  # noqa: E402


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
