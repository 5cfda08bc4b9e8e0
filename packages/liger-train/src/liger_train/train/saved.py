# SPDX-License-Identifier: Apache-2.0
"""Saved checkpoints from which a run resumes exactly: those of Transformers, each with a seal.

The Trainer writes a checkpoint file by file. If the run is killed meanwhile, or the disk is full, part of a checkpoint
remains, which the Trainer would load. The seal is written last and atomically: it holds the size and hash of every
file, and the progress of the run. An unfinished seal is written first, which distinguishes a partial checkpoint of ours
from a folder that another program wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from liger_bench.writable import check_folder
from liger_core.errors import OptionError
from liger_train.setup import Setup

# The options that may differ when a run is resumed.
MAY_CHANGE = ("steps", "memory_limit", "device", "nvme_folder", "trust_remote_code")
SEAL = "liger.json"
# Locked while a run writes to a folder, and names that run. Never removed, as in results.py.
LOCK = ".liger.run.lock"
UNFINISHED = SEAL + ".part"
# The fields of a seal besides the files; Sealer and Recorder.progress provide them.
FIELDS = ("setup", "known", "text", "losses", "timed", "peak_bytes", "peak_reserved_bytes", "static_bytes")
# The latest one, and the one before it in case the latest is damaged.
KEPT = 2


@dataclass(frozen=True)
class Saved:
    """An intact checkpoint, and the progress in its seal."""

    folder: Path
    step: int
    progress: dict[str, Any]


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other runs from writing to a folder.

    The operating system releases the lock when the process ends, however it ends.

    Raises OptionError if another run holds it.
    """
    check_folder("train: --output", folder)
    path = folder / LOCK
    try:
        lock = FileLock(path, timeout=0)
        lock.acquire()
    except Timeout:
        raise OptionError(
            f"train: --output must be a folder that no other run is writing to, got {folder}, in use by "
            f"{path.read_text() or 'another process'}; give another folder, or end that run"
        ) from None
    try:
        path.write_text(
            f"process {os.getpid()} on {platform.node()} since {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
        )
        yield
    finally:
        with contextlib.suppress(OSError):
            path.write_text("")
        lock.release()


def check_output(folder: Path, resume: bool) -> None:
    """Raise OptionError unless a run could write its checkpoints there now."""
    with held(folder):
        check_new(folder, resume)


def check_new(folder: Path, resume: bool) -> None:
    """Raise OptionError for checkpoints that a run would overwrite."""
    if not resume and checkpoints(folder):
        raise OptionError(
            f"train: --output must be a folder without checkpoints, got {folder}; --resume resumes from them"
        )


def begin(folder: Path) -> None:
    """Mark a checkpoint as unfinished before it is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SEAL).unlink(missing_ok=True)
    (folder / UNFINISHED).touch()


def seal(folder: Path, progress: dict[str, Any]) -> None:
    """Mark a checkpoint as complete."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (SEAL, UNFINISHED))
    files = {str(path.relative_to(folder)): _print_of(path) for path in paths}
    unfinished = folder / UNFINISHED
    with unfinished.open("w") as file:
        json.dump(progress | {"files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / SEAL)


def newest(folder: Path, notes: list[str]) -> Saved | None:
    """The latest intact checkpoint. Later ones are set aside, or removed if they are unfinished, with a note for each.

    Sealed checkpoints that an earlier call set aside are removed when there is a new one.
    """
    before = [path for path in folder.glob("damaged-checkpoint-*") if (path / SEAL).is_file()]
    for path in reversed(checkpoints(folder)):
        if (path / UNFINISHED).exists() and not (path / SEAL).exists():
            shutil.rmtree(path)
            notes.append(
                f"{path.name} was not completely written and was removed; resuming from the checkpoint before it."
            )
            continue
        problem, progress = _read(path)
        if problem is None:
            return Saved(path, _step(path), progress)
        while before:
            shutil.rmtree(before.pop())
        aside = _free(path.with_name("damaged-" + path.name))
        path.rename(aside)
        notes.append(
            f"{path.name} was damaged ({problem}) and is now {aside.name}; resuming from the checkpoint before it."
        )
    return None


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, intact or not, in the order of their steps."""
    paths = [
        path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()
    ]
    return sorted(paths, key=_step)


def check_same(saved: Saved, setup: dict[str, Any], text: str) -> None:
    """Raise OptionError if a checkpoint is of another run: an option differs, or the text has changed."""
    was = saved.progress["setup"]
    # An older version without an option trained with its default.
    others = [f"--{name.replace('_', '-')} {was[name]}" for name in setup if name in was and was[name] != setup[name]]
    if others:
        raise OptionError(
            f"train: --resume needs the options of the run in {saved.folder.parent}, which had {', '.join(others)}; "
            "give these, or another --output"
        )
    if saved.progress["text"] != text:
        raise OptionError(f"train: --resume needs the text of the run in {saved.folder.parent}, but it has changed")


def _read(path: Path) -> tuple[str | None, dict[str, Any]]:
    """The problem with a checkpoint, or None, and the progress in its seal."""
    try:
        progress: dict[str, Any] = json.loads((path / SEAL).read_text())
        if missing := {*FIELDS} - progress.keys():
            return f"its seal {SEAL} has no {min(missing)}", {}
        for name, known in progress["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing", {}
            size = file.stat().st_size
            if size != known["bytes"]:
                return f"{name} has {size} bytes of {known['bytes']}", {}
            if _print_of(file) != known:
                return f"{name} has changed since it was written", {}
    except FileNotFoundError:
        return "it was not completely written", {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its seal {SEAL} cannot be read: {type(error).__name__}", {}
    return None, progress


def _print_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _free(path: Path) -> Path:
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{path.name.partition('.')[0]}.{number}")
    return path


def check_resumable(setup: Setup) -> None:
    """Raise OptionError for a run whose state a checkpoint does not hold."""
    if setup.optimizer == "galore-layerwise":
        # It has one optimizer per weight, and the Trainer saves the state of none of them.
        raise OptionError(
            "train: --resume cannot restore --optimizer galore-layerwise, whose state is not saved; use galore"
        )
    if setup.tp > 1:
        # The Trainer saves the optimizer state of the first rank alone.
        raise OptionError(
            f"train: --resume cannot restore --tp {setup.tp}, since the saved optimizer state is that of one rank; "
            "give the checkpoint as --model, which starts with new optimizer state"
        )
    if setup.offload == "nvme":
        # DeepSpeed 0.19 restores the float32 weights of the optimizer, but takes the first step with the weights from
        # before that.
        raise OptionError(
            "train: --resume cannot restore --offload nvme exactly, since the first step would use the initial "
            "weights; "
            "give the checkpoint as --model, which starts with new optimizer state, or train with --offload parameters"
        )


def same(setup: Setup) -> dict[str, Any]:
    """The options that must not change when a run is resumed."""
    return {name: value for name, value in asdict(setup).items() if name not in MAY_CHANGE}
