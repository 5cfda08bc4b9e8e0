# SPDX-License-Identifier: Apache-2.0
"""What `liger verify --plain --shard ddp` says of every causal model type of Transformers, as a line of JSON each.

python tests/verify/every_type.py FILE.jsonl [--threads N] [TYPE ...]

Types that the file has already are left out, so that a run can be continued.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers import AutoModelForCausalLM

from hf.tiny_configs import TYPES, tiny_config
from liger_core.errors import OptionError
from liger_verify.matrix import outcomes
from liger_verify.training import NOISE, Training


def verdict(model: str) -> dict[str, Any]:
    """Return what is said of a type: right, wrong, refused with a reason, or failed.

    One that cannot be made tiny is tried as a folder.
    """
    start = time.perf_counter()
    said, sentence = compared(model)
    if "could not be made tiny" in sentence or sentence.startswith("one process"):
        with TemporaryDirectory(prefix="liger-verify-") as folder:
            try:
                save(model, folder)
            except Exception as error:
                sentence = f"{sentence} (as a folder: {' '.join(str(error).split())})"
            else:
                said, sentence = compared(folder)
    return {"type": model, "verdict": said, "sentence": sentence, "seconds": round(time.perf_counter() - start, 1)}


def compared(model: str) -> tuple[str, str]:
    training = Training(model, shard="ddp", liger=False)
    try:
        training.check()
    except OptionError as error:
        return "refused", str(error)
    (outcome,) = outcomes([training], tolerance=1e-4, patience=600.0, limit=600.0)
    refused = "OptionError: " in outcome.problem
    return "refused" if refused else outcome.result, outcome.problem or str(outcome.report)


def save(model: str, folder: str) -> None:
    """Save a checkpoint with the sizes of the sweep of `tests/hf`, whose weights all matter."""
    made = AutoModelForCausalLM.from_config(tiny_config(model))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * NOISE)
    made.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="lines are appended to it")
    parser.add_argument("types", nargs="*", default=TYPES, help="by default all")
    parser.add_argument("--threads", type=int, default=1, help="types at a time, each in processes with one thread")
    arguments = parser.parse_args()
    lines = arguments.file.read_text().splitlines() if arguments.file.is_file() else []
    done = {json.loads(line)["type"] for line in lines}
    with ThreadPoolExecutor(arguments.threads) as pool:
        list(pool.map(_appended(arguments.file), [name for name in arguments.types if name not in done]))


def _appended(path: Path) -> Callable[[str], None]:
    lock = Lock()

    def run(model: str) -> None:
        line = verdict(model)
        with lock, path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{model}: {line['verdict']}, {line['seconds']} s", flush=True)

    return run


if __name__ == "__main__":
    main()
