# SPDX-License-Identifier: Apache-2.0
"""Runs the code of a documentation page, in order, as a reader would.

Sybil parses a page. A `python` block runs in the namespace of its page, a `bash` block in a shell, and a block of any
language with a `title="file"` becomes that file in the folder where they run. Comments in the page, which no reader
sees, say the rest:

    <!-- setup: tiny_llama, batch -->     names from tests/docs/setups.py come into the namespace
    <!-- needs: trl, datasets -->         skips the page where one of these packages is missing
    <!-- hidden                           Python that runs here and is not shown, such as an assertion
    assert loss > 0
    -->
    <!-- gpu -->                          the next block needs a GPU
    <!-- gpus: 2 -->                      the next block needs as many GPUs, or none: it then runs on the CPU
    <!-- raises -->                       the next block raises the error that stands in the heading above it
    <!-- not run: reason -->              the next block is not run
"""

import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"[ \t]*(?P<language>[\w+-]*)(?P<attributes>[^\n]*)$\n", re.MULTILINE)
# What stands before a block and speaks about it.
ABOUT_BLOCKS = ("gpu", "gpus", "raises", "not run")
DIRECTIVES = ("setup", "needs", "hidden", *ABOUT_BLOCKS)
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
# Commands that run in this process, where what they import is imported already. Every other line is a shell's.
HERE = {"accelerate": "accelerate.commands.accelerate_cli:main", "liger": "liger_core.commands:main"}
# Commands of pages → modules of this Python, wherever its scripts are.
COMMANDS = {"torchrun": "torch.distributed.run"}
SECONDS = 300
# Holds what every Python that a page starts imports first.
STARTING = Path(__file__).with_name("starting")


@dataclass(frozen=True)
class Block:
    """One fenced block, with what the comments before it say."""

    language: str
    title: str
    source: str
    marks: dict[str, str]
    line: int
    heading: str

    @property
    def runs(self) -> bool:
        """Whether it is code for a reader to run: a file is made, and a shell or Python runs the rest."""
        return self.language in ("python", "bash") and not self.title


@dataclass
class Run:
    """Where and for which device a page runs."""

    folder: Path
    device: str
    monkeypatch: pytest.MonkeyPatch
    setups: dict[str, Callable[["Run", dict[str, Any]], None]]
    ran: list[Block] = field(default_factory=list)
    # Why blocks were left out.
    left: list[str] = field(default_factory=list)


def pages() -> list[Path]:
    """Return every page with code for readers, except docs/extend, whose code tests/test_extend.py applies."""
    docs = (page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "extend")
    return [ROOT / "README.md", *docs, *sorted(ROOT.glob("packages/*/README.md"))]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page."""
    return [example.parsed for example in parse(path).examples() if isinstance(example.parsed, Block)]


def parse(path: Path) -> Document:
    return Document.parse(str(path), _comments, _fences)


def run(path: Path, run: Run) -> None:
    """Run the page; an error shows its place in the page."""
    document = parse(path)
    document.namespace["__name__"] = "__main__"
    for example in document.examples():
        evaluate(example, run)


def evaluate(example: Example, run: Run) -> None:
    __tracebackhide__ = True
    block = example.parsed
    if not isinstance(block, Block):
        directive, arguments, source = example.region.lexemes["directive"], example.region.lexemes["arguments"], block
        if directive == "setup":
            for name in _names(arguments):
                run.setups[name](run, example.namespace)
        elif directive == "needs":
            for name in _names(arguments):
                pytest.importorskip(name, reason=f"needs {name}")
        elif directive == "hidden":
            _python(example, source)
        return
    if block.title:
        (run.folder / block.title).parent.mkdir(parents=True, exist_ok=True)
        (run.folder / block.title).write_text(block.source)
    elif not block.runs:
        return
    elif why := _why_not(block, run):
        run.left.append(why)
    else:
        action = partial(_bash, block, run)
        if block.language == "python":
            action = partial(_python, example, example.region.lexemes["source"])
        _expecting(block, action) if "raises" in block.marks else action()
        run.ran.append(block)


def _why_not(block: Block, run: Run) -> str:
    """Why a block is not run here, or nothing."""
    if "not run" in block.marks:
        return block.marks["not run"]
    if "gpu" in block.marks and run.device != "cuda":
        return "needs a GPU"
    if "gpus" in block.marks and run.device == "cuda" and torch.cuda.device_count() < int(block.marks["gpus"]):
        return f"needs {block.marks['gpus']} GPUs"
    return ""


def _expecting(block: Block, action: Callable[[], None]) -> None:
    """The heading above the block has the words of the error, with … for what differs from call to call."""
    wanted = ".*".join(re.escape(part) for part in block.heading.strip("` ").split("…"))
    try:
        action()
    except Exception as problem:
        said = f"{type(problem).__name__}: {problem}"
        assert re.match(wanted, said, flags=re.DOTALL), f"the heading says {block.heading}, the block raised {said}"
    else:
        raise AssertionError(f"the block must raise {block.heading}, it raised nothing")


def _python(example: Example, source: Any) -> None:
    example.parsed = source
    PythonEvaluator()(example)


def _bash(block: Block, run: Run) -> None:
    environment = {
        "PATH": os.pathsep.join([str(_commands(run.folder)), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(STARTING), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        **({"CUDA_VISIBLE_DEVICES": ""} if run.device == "cpu" else {}),
    }
    lines = [words for line in block.source.splitlines() if (words := shlex.split(line, comments=True))]
    if all(words[0] in HERE for words in lines):
        with run.monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            for words in lines:
                patch.setattr(sys, "argv", words)
                _here(words)
        return
    command, variables = ["bash", "-euo", "pipefail", "-c", block.source], {**os.environ, **environment}
    options = {"cwd": run.folder, "env": variables, "timeout": SECONDS}
    done = subprocess.run(command, **options, capture_output=True, text=True)
    assert done.returncode == 0, f"{block.source}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _here(words: list[str]) -> None:
    """Run one command line in this process."""
    code = None
    try:
        pkgutil.resolve_name(HERE[words[0]])()
    except SystemExit as ended:
        code = ended.code
    assert not code, f"{shlex.join(words)} ended with {code}"


def _commands(folder: Path) -> Path:
    """A folder with the other commands that pages use."""
    home = folder / ".bin"
    home.mkdir(exist_ok=True)
    for name, call in {"python": "", **{name: f"-m {module}" for name, module in COMMANDS.items()}}.items():
        (home / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        (home / name).chmod(0o755)
    return home


def _names(arguments: str) -> list[str]:
    return [name.strip() for name in arguments.split(",") if name.strip()]


def _comments(document: Document) -> Iterable[Region]:
    for directive in DIRECTIVES:
        for region in DirectiveInHTMLCommentLexer(rf"{directive}(?=[:\s])")(document):
            region.parsed = region.lexemes["source"]
            yield region


def _fences(document: Document) -> Iterable[Region]:
    for region in RawFencedCodeBlockLexer(FENCE)(document):
        language, source, before = region.lexemes["language"], region.lexemes["source"], document.text[: region.start]
        title = re.search(r'title="([^"]*)"', region.lexemes["attributes"])
        prose = re.sub(r"^```.*?^```", "", before, flags=re.DOTALL | re.MULTILINE)
        heading, line = ["", *HEADING.findall(prose)][-1], before.count("\n") + 1
        region.parsed = Block(language, title[1] if title else "", source, _marks(before), line, heading)
        yield region


def _marks(before: str) -> dict[str, str]:
    """The comments that stand directly before a block."""
    marks: dict[str, str] = {}
    while (found := re.search(rf"<!-- ({'|'.join(ABOUT_BLOCKS)})(?:: (.*?))? -->\s*\Z", before)) is not None:
        marks[found[1]] = found[2] or ""
        before = before[: found.start()]
    return marks
