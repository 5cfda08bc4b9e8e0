# SPDX-License-Identifier: Apache-2.0
"""No file uses a refused wording; docstrings begin with a verb or a noun phrase; names say the thing."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKED = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "benchmarks", "docs", "examples"]
CHECKED += ["noxfile.py", "packages", "tests"]
SUFFIXES = (".md", ".py", ".toml")
# Term of the documentation of PyTorch and Hugging Face → wordings that tests refuse; … stands for any ending. A wording
# is fine inside its term.
GLOSSARY = {
    "a training run, a training step, a training loop": ["a training", "trainings"],
    "report, print, show, distinguish": ["tell", "tells", "told", "telling"],
    "recompute, activation checkpointing": ["compute again", "computes again", "computed again", "computing again", "computed anew", "compute twice", "computed twice"],
    "resume, continue": ["go on", "goes on", "going on", "went on"],
    "again, rebuild": ["anew"],
    "host memory, CPU offload": ["memory of the host", "the host's memory"],
    "out of memory, OOM": ["memory ran out", "memory runs out", "memory that ran out"],
    "world size, shard": ["ranks in all", "piece of a rank"],
    "matmul, matrix multiply, GEMM": ["product of matrices", "matrix product…", "cuBLAS product…", "grouped product…", "one product", "two products", "three products", "four products"],
    "baseline": ["plain model", "plain training", "plain and with", "plain against", "÷ plain"],
    "speedup, throughput": ["times as fast", "speed-up…"],
    "hidden size": ["model's width", "width of the model", "hidden width"],
    "LM head, LM head and loss": ["output projection…", "head and loss", "head and its loss"],
    "gated MLP, gated activation": ["gated unit", "gated units"],
    "RMSNorm": ["norm without a mean", "norm without mean"],
    "original report": ["the seed's", "seed's figures"],
    "supports, does not support": ["goes with", "go together", "does not go", "do not go"],
    "optional, required, default": ["may be left out", "must be there", "must not be there", "taken by itself"],
    "interleaved": ["take turns", "takes turns", "taking turns"],
    "unavailable": ["at hand"],
    "anyone who, code that": ["whoever"],
    "is not a, there is no, there are no, is no longer, are no longer, is no larger, is no less, is no more": ["is no", "are no", "was no", "were no"],
    "should, must, will": ["shall"],
    "instead of, in place of": ["in the place of", "in the stead of"],
    "Accuracy, Limitations (headings)": ["what it is worth", "what it does not know"],
    "behavior, color, neighbor, center, gray, favor, license": ["behaviour…", "colour…", "neighbour…", "centre…", "centring", "grey", "favour…", "licence…"],
    "-ize, -ization, -yze": ["normalis…", "initialis…", "materialis…", "optimis…", "synchronis…", "recognis…", "serialis…", "specialis…", "generalis…", "minimis…", "maximis…", "summaris…", "organis…", "quantis…", "vectoris…", "analyse…", "analysing"],
    "setup, canceled, labeled, modeled, toward, program, spelled": ["set-up…", "cancelled", "cancelling", "labelled", "modelled", "towards", "programme", "modelling", "spelt", "misspelt"],
}  # fmt: skip
WRITTEN = [term for written in GLOSSARY for term in written.split(", ")]
RETIRED = [term for terms in GLOSSARY.values() for term in terms]
# A docstring that begins with one of these is a clause without a subject or a verb.
HEADLESS = re.compile(
    r"(What|Those|That|Of|In which|As|With|By|Where|Whose|Which|Why|Once|Afterwards|One that|On one|From)\b"
)

# Names that say nothing about the thing.
GENERIC = {"found", "given", "place", "asked", "kept", "told", "made", "came", "part", "own", "one"}
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())

pytestmark = pytest.mark.cpu


def any_of(terms: list[str]) -> re.Pattern[str]:
    """Matches whole words, on one line or over two lines of a comment or quote; … stands for any ending."""
    words = (
        r"[\s#>_]+".join(map(re.escape, term.split())).replace("…", r"\w*")
        for term in sorted(terms, key=len, reverse=True)
    )
    return re.compile(rf"(?<![^\W_])({'|'.join(words)})(?![^\W_])", re.IGNORECASE)


FINE, WRONG = any_of(WRITTEN), any_of(RETIRED)


def retired(text: str) -> Iterator[tuple[int, str]]:
    """Line and wording of every retired term that is not inside a term of the glossary."""
    fine = [match.span() for match in FINE.finditer(text)]
    for match in WRONG.finditer(text):
        if not any(first <= match.start() and match.end() <= last for first, last in fine):
            yield text.count("\n", 0, match.start()) + 1, match[0]


def test_no_file_uses_a_retired_term() -> None:
    listed = subprocess.run(["git", "ls-files", "--", *CHECKED], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    named = map(Path, listed.stdout.splitlines())
    paths = [path for path in named if path.suffix in SUFFIXES and (ROOT / path).exists()]
    assert len(paths) > 300
    found = []
    for path in paths:
        if ROOT / path != Path(__file__):
            found += [f"{path}:{line}: {wording!r}" for line, wording in retired((ROOT / path).read_text())]
    assert not found, "\n".join(["retired terms; GLOSSARY has the terms to use:", *found])


def test_every_retired_term_is_found() -> None:
    sentences = [f"It is (so): {term.replace('…', 'd').replace(' ', chr(10) + '    # ')}." for term in RETIRED]
    assert [sentence for sentence in sentences if not list(retired(sentence))] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_is_a_clause_without_a_subject_or_a_verb(package: str) -> None:
    paths = sorted((ROOT / "packages" / package / "src").rglob("*.py"))
    assert paths
    headless = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node) or ""
                if HEADLESS.match(docstring):
                    name = f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
                    headless.append(f"{name}: {docstring.splitlines()[0]}")
    rule = 'a docstring begins with a verb ("Return …") or a noun phrase ("The …"):'
    assert not headless, "\n".join([rule, *headless])


def generic_names(source: str) -> Iterator[str]:
    """Line and name of every variable, attribute, parameter and function with a generic name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
            ) if name in GENERIC:
                yield f"{node.lineno}: {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_is_generic(package: str) -> None:
    paths = sorted((ROOT / "packages" / package / "src").rglob("*.py"))
    assert paths
    generic = [f"{path.relative_to(ROOT)}:{name}" for path in paths for name in generic_names(path.read_text())]
    assert not generic, "\n".join(["a name says the thing, such as registry, match, index or rows:", *generic])
