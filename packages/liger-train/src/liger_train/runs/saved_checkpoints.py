# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the Trainer with a seal, from which a run resumes exactly.

The Trainer writes a checkpoint file by file. If the run is killed meanwhile, or the disk is full, a partial checkpoint
remains, which the Trainer would load. The seal has the size and hash of every file, and the progress of the run; it is
written last, and atomically. An unfinished seal is written first, to distinguish a partial checkpoint from a folder of
another program.
"""

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
from liger_train.errors import SetupError
from liger_train.setup import Setup

# The options that may differ when a run is resumed.
MAY_CHANGE = ("steps", "memory_limit", "device", "nvme_folder", "trust_remote_code")
# A checkpoint with this folder is sharded (sharded_checkpoints.py). These options may differ, too, if the number of
# sequences in a step does not.
SHARDS = "shards"
MAY_CHANGE_IF_SHARDED = ("ranks", "shard", "tp", "cp", "replicate", "batch", "accumulation")
SEAL = "liger.json"
# Locked while a run writes to the folder; contains the process of that run. It is never removed, as in results.py.
LOCK = ".liger.run.lock"
UNFINISHED = SEAL + ".part"
# The required fields of a seal besides the files, from Recorder.progress and the run.
FIELDS = ("setup", "known", "text", "losses", "timed", "peak_bytes", "peak_reserved_bytes", "static_bytes")
# The latest checkpoint, and the previous one in case the latest is damaged.
MOST_CHECKPOINTS = 2


@dataclass(frozen=True)
class SavedCheckpoint:
    """An intact checkpoint, and the progress in its seal."""

    folder: Path
    step: int
    progress: dict[str, Any]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs.

    The operating system releases the lock when the process ends, however it ends.

    Raises OptionError if another run holds the lock.
    """
    check_folder("train: --output", folder)
    path = folder / LOCK
    try:
        lock = FileLock(path, timeout=0)
        lock.acquire()
    except Timeout:
        raise SetupError(
            f"--output must be a folder that no other run is writing to, got {folder}, in use by "
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


def check_new(folder: Path, resume: bool) -> None:
    """Raise OptionError if a run would overwrite checkpoints."""
    if not resume and checkpoints(folder):
        raise SetupError(f"--output must be a folder without checkpoints, got {folder}; --resume resumes from them")


def mark_unfinished(folder: Path) -> None:
    """Mark a checkpoint as unfinished before it is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SEAL).unlink(missing_ok=True)
    (folder / UNFINISHED).touch()


def seal(folder: Path, progress: dict[str, Any]) -> None:
    """Mark a checkpoint as complete."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (SEAL, UNFINISHED))
    files = {str(path.relative_to(folder)): _fingerprint(path) for path in paths}
    unfinished = folder / UNFINISHED
    with unfinished.open("w") as file:
        json.dump(progress | {"files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / SEAL)


def latest_intact(folder: Path, notes: list[str]) -> SavedCheckpoint | None:
    """Return the latest intact checkpoint. Rename damaged ones after it, and remove unfinished ones, with notes.

    Damaged checkpoints that an earlier call renamed are removed as soon as there is another one.
    """
    damaged_before = [path for path in folder.glob("damaged-checkpoint-*") if (path / SEAL).is_file()]
    for path in reversed(checkpoints(folder)):
        if (path / UNFINISHED).exists() and not (path / SEAL).exists():
            shutil.rmtree(path)
            notes.append(f"{path.name} was not completely written and was removed; resuming from the one before it.")
            continue
        problem, progress = _read(path)
        if problem is None:
            return SavedCheckpoint(path, _step(path), progress)
        while damaged_before:
            shutil.rmtree(damaged_before.pop())
        renamed = _unused(path.with_name("damaged-" + path.name))
        path.rename(renamed)
        notes.append(f"{path.name} was damaged ({problem}) and is now {renamed.name}; resuming from the one before it.")
    return None


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints, intact or not, in the order of their steps."""
    paths = [p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(paths, key=_step)


def is_sharded(folder: Path) -> bool:
    """Return whether each rank saved its own shards in a checkpoint."""
    return (folder / SHARDS).is_dir()


def check_same(saved: SavedCheckpoint, setup: dict[str, Any], text: str) -> None:
    """Raise OptionError if a checkpoint belongs to another run: an option differs, or the text has changed."""
    options = saved.progress["setup"]
    # A version before an option existed trained with its default.
    differing = [name for name in setup if name in options and options[name] != setup[name]]
    if is_sharded(saved.folder) and _sequences(options) == _sequences(setup):
        differing = [name for name in differing if name not in MAY_CHANGE_IF_SHARDED]
    others = [f"--{name.replace('_', '-')} {options[name]}" for name in differing]
    if others:
        raise SetupError(
            f"--resume needs the options of the run in {saved.folder.parent}, which had {', '.join(others)}; "
            "give these, or another --output"
        )
    if saved.progress["text"] != text:
        raise SetupError(f"--resume needs the text of the run in {saved.folder.parent}, but it has changed")


def _sequences(options: dict[str, Any]) -> int:
    names = ("model", "batch", "accumulation", "ranks", "tp", "cp")
    return Setup(**{name: options[name] for name in names}).sequences_per_step


def _read(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the problem with a checkpoint, or None, and the progress in its seal."""
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
            if _fingerprint(file) != known:
                return f"{name} has changed since it was written", {}
    except FileNotFoundError:
        return "it was not completely written", {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its seal {SEAL} cannot be read: {type(error).__name__}", {}
    return None, progress


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _unused(path: Path) -> Path:
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{path.name.partition('.')[0]}.{number}")
    return path


def check_resumable(setup: Setup) -> None:
    """Raise OptionError for a setup whose state a checkpoint does not hold."""
    if setup.optimizer == "galore-layerwise":
        # It has one optimizer per weight, whose states the Trainer does not save.
        raise SetupError("--resume cannot restore --optimizer galore-layerwise, whose state is not saved; use galore")
    if setup.offload == "nvme":
        # DeepSpeed 0.19 restores the optimizer's float32 weights, but computes the first step with the initial weights.
        raise SetupError(
            "--resume cannot restore --offload nvme exactly, since the first step would use the initial "
            "weights; give the checkpoint as --model, which starts with new optimizer state, or train with --offload "
            "parameters"
        )


def fixed_options(setup: Setup) -> dict[str, Any]:
    """Return the options that must not change when a run is resumed."""
    return {name: value for name, value in asdict(setup).items() if name not in MAY_CHANGE}
