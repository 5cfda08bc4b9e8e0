# SPDX-License-Identifier: Apache-2.0
"""What a row says of where it was measured."""

import subprocess
from pathlib import Path

import pytest
import torch

from liger_bench import machine


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that asks, in a checkout of its own."""
    source = tmp_path / "packages" / "liger-bench" / "src" / "liger_bench" / "machine.py"
    source.parent.mkdir(parents=True)
    source.write_text("first\n")
    (tmp_path / "notes.txt").write_text("first\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=Test", "-c", "user.email=test@example.com"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "First"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(machine, "__file__", str(source))
    return source


def commit() -> str:
    return machine.describe(torch.device("cpu"))["commit"]


def test_each_change_to_the_sources_is_a_commit_of_its_own(sources: Path) -> None:
    clean = commit()
    sources.write_text("second\n")
    second = commit()
    sources.write_bytes(b"\xff\x00third\n")
    third = commit()
    sources.write_text("second\n")
    assert len(clean) == 12
    assert second.startswith(f"{clean}+changes-")
    assert third.startswith(f"{clean}+changes-")
    assert second != third
    assert commit() == second
    # Other files do not count.
    (sources.parents[4] / "notes.txt").write_text("second\n")
    sources.write_text("first\n")
    assert commit() == clean
