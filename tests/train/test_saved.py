# SPDX-License-Identifier: Apache-2.0
"""Seals of checkpoints: whatever is wrong with one, the checkpoint before it is taken, and what is of no use does not
pile up."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from liger_core.errors import OptionError
from liger_train.runs import saved_checkpoints

RUN: dict[str, Any] = {
    "setup": {"model": "tiny"}, "known": {"parameters": 7}, "text": "a hash", "losses": [10.5, 10.25], "timed": [0.5],
    "peak_bytes": None, "peak_reserved_bytes": 1 << 30, "static_bytes": 1 << 20,
}  # fmt: skip
WRONG: tuple[Any, ...] = (None, 1, "words", ["words"], [], {"a": 1}, {})
SEALED = RUN | {"files": {}}


def save(checkpoint: Path) -> None:
    saved_checkpoints.mark_unfinished(checkpoint)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    saved_checkpoints.seal(checkpoint, RUN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints that are whole, of steps 2 and 4."""
    for step in (2, 4):
        save(tmp_path / f"checkpoint-{step}")
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def resumed(folder: Path) -> tuple[int | None, list[str]]:
    """The step that a run resumes from, and its notes."""
    notes: list[str] = []
    found = saved_checkpoints.latest_intact(folder, notes)
    return (None if found is None else found.step), notes


def test_an_intact_checkpoint_is_used_without_a_message(folder: Path) -> None:
    assert resumed(folder) == (4, [])
    assert names(folder / "checkpoint-4") == ["liger.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 2), "model.safetensors has 2 bytes of 7"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"weighty"), "model.safetensors has changed since it was written"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / saved_checkpoints.SEAL).unlink(), "it was not completely written"),
    ],
    ids=["cut", "changed", "lost_file", "killed_while_saving"],
)  # fmt: skip
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(
    folder: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(folder / "checkpoint-4")
    note = f"checkpoint-4 was damaged ({problem}) and is now damaged-checkpoint-4; resuming from the one before it."
    assert resumed(folder) == (2, [note])
    assert names(folder) == ["checkpoint-2", "damaged-checkpoint-4"]


def wrong_seals() -> list[Any]:
    """Each field of a seal missing, files and whole seals that are something else, and seals that were cut."""
    found = {f"no {lost}": {name: SEALED[name] for name in SEALED if name != lost} for lost in SEALED}
    found |= {f"a file {value}": SEALED | {"files": {"model.safetensors": value}} for value in WRONG}
    found |= {f"all {value}": value for value in WRONG}
    whole = json.dumps(SEALED)
    cut = [pytest.param(whole[:length], id=f"{length} bytes") for length in range(0, len(whole), 7)]
    return [pytest.param(json.dumps(value), id=name) for name, value in found.items()] + cut


@pytest.mark.parametrize("content", wrong_seals())
def test_a_seal_with_anything_else_in_it_costs_one_checkpoint(folder: Path, content: str) -> None:
    (folder / "checkpoint-4" / saved_checkpoints.SEAL).write_text(content)
    step, (note,) = resumed(folder)
    assert step == 2
    assert note.startswith("checkpoint-4 was damaged (")
    assert names(folder) == ["checkpoint-2", "damaged-checkpoint-4"]


def test_a_seal_from_before_there_was_an_option_is_of_a_run_without_it(folder: Path) -> None:
    found = saved_checkpoints.latest_intact(folder, [])
    saved_checkpoints.check_same(found, {"model": "tiny", "new_option": False}, "a hash")
    with pytest.raises(OptionError, match="which had --model tiny; give these, or another --output"):
        saved_checkpoints.check_same(found, {"model": "small", "new_option": False}, "a hash")


def test_an_unfinished_checkpoint_is_removed(folder: Path) -> None:
    saved_checkpoints.mark_unfinished(folder / "checkpoint-6")
    (folder / "checkpoint-6" / "model.safetensors").write_bytes(b"wei")
    note = "checkpoint-6 was not completely written and was removed; resuming from the one before it."
    assert resumed(folder) == (4, [note])
    assert names(folder) == ["checkpoint-2", "checkpoint-4"]


def test_a_checkpoint_that_is_rewritten_is_unfinished_meanwhile(folder: Path) -> None:
    saved_checkpoints.mark_unfinished(folder / "checkpoint-4")
    assert resumed(folder)[0] == 2


def test_somebody_elses_checkpoint_is_set_aside_and_stays(folder: Path) -> None:
    for step in (6, 8):
        (folder / f"checkpoint-{step}").mkdir()
        assert resumed(folder)[0] == 4
    assert names(folder) == ["checkpoint-2", "checkpoint-4", "damaged-checkpoint-6", "damaged-checkpoint-8"]


def test_of_damaged_checkpoints_the_last_one_stays(folder: Path) -> None:
    for step in range(6, 12):
        checkpoint = folder / f"checkpoint-{step}"
        save(checkpoint)
        (checkpoint / "model.safetensors").write_bytes(b"weighty")
        assert resumed(folder)[0] == 4
        assert names(folder) == ["checkpoint-2", "checkpoint-4", f"damaged-checkpoint-{step}"]
