# SPDX-License-Identifier: Apache-2.0
"""The planted bugs: each still has a place in the sources."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_selects_the_tests_of_a_planted_bug_names_something(mutant: Mutant) -> None:
    """A test that was renamed would otherwise be found missing by the mutation check alone, minutes later."""
    files, _, selected = " ".join(mutant.tests).partition(" -k ")
    texts = [(ROOT / file.partition("::")[0]).read_text() for file in files.split() if file.endswith(".py") or "::" in file]
    # Ops and samples name the parameters of tests.
    texts += [path.read_text() for path in (ROOT / "packages/liger-core/src/liger_core/ops").glob("*.py")]
    unknown = [word for word in re.findall(r"[a-z]+_[a-z]+_[a-z_]+", selected) if not any(word in text for text in texts)]

    assert unknown == []
