# SPDX-License-Identifier: Apache-2.0
"""What is saved of a training, so that it goes on exactly where it was: Transformers' checkpoints, each with a seal.

The Trainer writes a checkpoint file by file. A run that is killed meanwhile, or a disk that is full, leaves half of one, which
the Trainer would load. The seal is written last and in one piece: it holds the size and the hash of every file, and what the
training had done so far.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_core.errors import OptionError

SEAL = "liger.json"
# The newest one and the one before, should the newest be damaged.
KEPT = 2


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole, and what its seal tells."""

    folder: Path
    step: int
    told: dict[str, Any]


def seal(folder: Path, told: dict[str, Any]) -> None:
    """Declare a checkpoint whole."""
    files = {str(path.relative_to(folder)): _print_of(path) for path in _files(folder)}
    part = folder / (SEAL + ".part")
    with part.open("w") as file:
        json.dump(told | {"files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / SEAL)


def newest(folder: Path, notes: list[str]) -> Saved | None:
    """The last checkpoint that is whole; later ones are set aside, with a sentence for each."""
    for path in reversed(checkpoints(folder)):
        problem, told = _read(path)
        if problem is None:
            return Saved(path, _step(path), told)
        aside = _free(path.with_name("damaged-" + path.name))
        path.rename(aside)
        notes.append(f"{path.name} was damaged ({problem}) and is now {aside.name}; the training goes on from the checkpoint before it.")
    return None


def checkpoints(folder: Path) -> list[Path]:
    """All that there are, whole or not, in the order of their steps."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]
    return sorted(found, key=_step)


def check_same(saved: Saved, setup: dict[str, Any], text: str) -> None:
    """Raise OptionError if a checkpoint is of another training: one of these options was another, or the text has changed."""
    was = saved.told["setup"]
    others = [f"--{name.replace('_', '-')} {was.get(name)}" for name in setup if was.get(name) != setup[name]]
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
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (SEAL, SEAL + ".part"))


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
