# SPDX-License-Identifier: Apache-2.0
"""What is saved of a training, so that it goes on exactly where it was: Transformers' checkpoints, each with a seal.

The Trainer writes a checkpoint file by file. A run that is killed meanwhile, or a disk that is full, leaves half of one, which
the Trainer would load. The seal is written last and in one piece: it holds the size and the hash of every file, and what the
training had done so far. Before the first file there is an unfinished seal, by which half a checkpoint is known as one of these
and not as somebody else's.
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
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from liger_bench.writable import check_folder
from liger_core.errors import OptionError

SEAL = "liger.json"
# Held while a run writes to a folder, and says which one does. Never removed, as in results.py.
LOCK = ".liger.run.lock"
UNFINISHED = SEAL + ".part"
NUMBER = (int, float)
SIZE = (int, type(None))
# What a seal holds besides the files, and the types of the values in it; SEAL's writers are _Sealer and Recorder.told.
FIELDS = {"setup": dict, "known": dict, "text": str, "losses": list, "timed": list} | dict.fromkeys(
    ("peak_bytes", "peak_reserved_bytes", "static_bytes"), SIZE
)
# The newest one and the one before, should the newest be damaged.
KEPT = 2


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole, and what its seal tells."""

    folder: Path
    step: int
    told: dict[str, Any]


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other runs from writing to a folder. The lock is the operating system's: it ends with the process, however that ends.

    Raises OptionError if another run holds it.
    """
    check_folder("train: --output", folder)
    path = folder / LOCK
    try:
        lock = FileLock(path, timeout=0)
        lock.acquire()
    except Timeout:
        raise OptionError(
            f"train: --output must be a folder that no other run is writing to, got {folder}, in use by {path.read_text() or 'another process'}; "
            "give another folder, or end that run"
        ) from None
    try:
        path.write_text(f"process {os.getpid()} on {platform.node()} since {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}")
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
        raise OptionError(f"train: --output must be a folder without checkpoints, got {folder}; --resume goes on from them")


def begin(folder: Path) -> None:
    """Declare a checkpoint that is about to be written unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SEAL).unlink(missing_ok=True)
    (folder / UNFINISHED).touch()


def seal(folder: Path, told: dict[str, Any]) -> None:
    """Declare a checkpoint whole."""
    files = {str(path.relative_to(folder)): _print_of(path) for path in _files(folder)}
    part = folder / UNFINISHED
    with part.open("w") as file:
        json.dump(told | {"files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / SEAL)


def newest(folder: Path, notes: list[str]) -> Saved | None:
    """The last checkpoint that is whole. Later ones are set aside, or removed if they are unfinished, with a sentence for each.

    Of those with a seal that were set aside before, none is kept when there is a new one.
    """
    before = [path for path in folder.glob("damaged-checkpoint-*") if (path / SEAL).is_file()]
    for path in reversed(checkpoints(folder)):
        if (path / UNFINISHED).exists() and not (path / SEAL).exists():
            shutil.rmtree(path)
            notes.append(f"{path.name} was not written to its end and was removed; resuming from the checkpoint before it.")
            continue
        problem, told = _read(path)
        if problem is None:
            return Saved(path, _step(path), told)
        while before:
            shutil.rmtree(before.pop())
        aside = _free(path.with_name("damaged-" + path.name))
        path.rename(aside)
        notes.append(f"{path.name} was damaged ({problem}) and is now {aside.name}; resuming from the checkpoint before it.")
    return None


def checkpoints(folder: Path) -> list[Path]:
    """All that there are, whole or not, in the order of their steps."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]
    return sorted(found, key=_step)


def check_same(saved: Saved, setup: dict[str, Any], text: str) -> None:
    """Raise OptionError if a checkpoint is of another training: one of these options was another, or the text has changed."""
    was = saved.told["setup"]
    # A version that did not have an option yet trained as if it were not given.
    others = [f"--{name.replace('_', '-')} {was[name]}" for name in setup if name in was and was[name] != setup[name]]
    if others:
        raise OptionError(
            f"train: --resume needs the options of the training in {saved.folder.parent}, where it was {', '.join(others)}; "
            "give these, or another --output"
        )
    if saved.told["text"] != text:
        raise OptionError(f"train: the text of the training in {saved.folder.parent} must be as it was for --resume, but it has changed")


def _read(path: Path) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with a checkpoint, or None, and what its seal tells."""
    try:
        told: dict[str, Any] = json.loads((path / SEAL).read_text())
        wrong = next((name for name, kind in FIELDS.items() if not isinstance(told[name], kind)), None)
        if wrong or not all(isinstance(number, NUMBER) for number in (*told["losses"], *told["timed"])):
            return f"its seal {SEAL} cannot be read: {wrong or 'losses'}", {}
        for name, known in told["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing", {}
            size = file.stat().st_size
            if size != known["bytes"]:
                return f"{name} has {size} bytes of {known['bytes']}", {}
            if _print_of(file) != known:
                return f"{name} is not what was written", {}
    except FileNotFoundError:
        return "it was not written to its end", {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its seal {SEAL} cannot be read: {type(error).__name__}", {}
    return None, told


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (SEAL, UNFINISHED))


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
