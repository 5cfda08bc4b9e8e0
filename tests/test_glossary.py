# SPDX-License-Identifier: Apache-2.0
"""No page, source or test uses a term that the glossary in CONTRIBUTING.md retires."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKED = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "benchmarks",
    "CONTRIBUTING.md",
    "README.md",
    "docs",
    "examples",
    "noxfile.py",
    "packages",
    "tests",
)
SUFFIXES = (".md", ".py", ".toml")
SECTION = re.compile(r"^## Glossary\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
ROWS = [
    row
    for row in re.findall(r"^\| (.+) \| (.+) \|$", SECTION.search((ROOT / "CONTRIBUTING.md").read_text())[0], re.MULTILINE)
    if "`" in row[1]
]
WRITTEN = [term for written, _ in ROWS for term in written.split(", ")]
RETIRED = [term for _, retired in ROWS for term in re.findall(r"`([^`]+)`", retired)]

pytestmark = pytest.mark.cpu


def any_of(terms: list[str]) -> re.Pattern[str]:
    """Matches whole words, on one line or over two lines of a comment or quote; … stands for any ending."""
    words = (r"[\s#>_]+".join(map(re.escape, term.split())).replace("…", r"\w*") for term in sorted(terms, key=len, reverse=True))
    return re.compile(rf"(?<![^\W_])({'|'.join(words)})(?![^\W_])", re.IGNORECASE)


FINE, WRONG = any_of(WRITTEN), any_of(RETIRED)


def retired(text: str) -> Iterator[tuple[int, str]]:
    """Line and wording of every retired term that is not inside a term of the glossary's left column."""
    fine = [match.span() for match in FINE.finditer(text)]
    for match in WRONG.finditer(text):
        if not any(first <= match.start() and match.end() <= last for first, last in fine):
            yield text.count("\n", 0, match.start()) + 1, match[0]


def test_no_file_uses_a_retired_term() -> None:
    listed = subprocess.run(["git", "ls-files", "--", *CHECKED], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [path for path in map(Path, listed.stdout.splitlines()) if path.suffix in SUFFIXES and (ROOT / path).exists()]
    assert len(paths) > 300
    found = []
    for path in paths:
        # The section itself keeps its number of lines.
        text = SECTION.sub(lambda section: "\n" * section[0].count("\n"), (ROOT / path).read_text())
        found += [f"{path}:{line}: {wording!r}" for line, wording in retired(text)]
    assert not found, "\n".join(["retired terms; CONTRIBUTING.md's glossary has the terms to use:", *found])


@pytest.mark.parametrize("term", RETIRED)
def test_a_retired_term_is_found(term: str) -> None:
    sentence = f"It is (so): {term.replace('…', 'd').replace(' ', chr(10) + '    # ')}."
    assert [line for line, _ in retired(sentence)] == [1]


@pytest.mark.parametrize(
    "text", ["a training run", "A\n# training step", "the LM head and loss", "there is no way", "it is no longer", "storytelling"]
)
def test_a_term_of_the_glossary_is_fine(text: str) -> None:
    assert list(retired(text)) == []
