# SPDX-License-Identifier: Apache-2.0
"""The planted bugs: each still has a place in the sources."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from planted import MUTANTS, Mutant  # noqa: E402


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_has_one_place(mutant: Mutant) -> None:
    (source,) = ROOT.glob(f"packages/*/src/{mutant.file}")

    assert source.read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_python(mutant: Mutant) -> None:
    (source,) = ROOT.glob(f"packages/*/src/{mutant.file}")

    compile(source.read_text().replace(mutant.old, mutant.new), mutant.file, "exec")
