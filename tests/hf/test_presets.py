# SPDX-License-Identifier: Apache-2.0
"""Models have the same names in every command, and a name that is none gets the names that are."""

import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from liger_hf.presets import ALIASES, PRESETS, preset, preset_name

pytestmark = pytest.mark.cpu
Stop = type("Stop", (Exception,), {})


def stop(what: Callable[..., Any]) -> Callable[..., Any]:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        raise Stop(what(*args, **kwargs))

    return stopped


# The command line, and what it hands the model to: at that place its name.
COMMANDS: dict[str, tuple[tuple[str, ...], str, Callable[..., Any]]] = {
    "demo": (("demo", "--model"), "liger_train.demo.run.compare", lambda setup, *_: setup.model),
    "train": (("train", "--model"), "liger_train.runs.command._train", lambda setup, *_: setup.model),
    "plan": (("plan", "--device", "cpu", "--model"), "liger_train.plan.command._plan", lambda setup, *_: setup.model),
    "inspect": (("inspect",), "liger_hf.inspection.inspect", lambda config, **_: config.to_dict()),
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), [*product(COMMANDS, ALIASES), *product(["inspect"], PRESETS)])
def test_every_command_takes_every_name(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_core.commands import main

    words, place, seen = COMMANDS[command]
    monkeypatch.setattr(place, stop(seen))
    monkeypatch.setattr("sys.argv", ["liger", *words, name])
    with pytest.raises(Stop) as stopped:
        main()
    known_as = preset_name(name)
    assert stopped.value.args[0] == (preset(known_as).to_dict() if command == "inspect" else known_as)


SUGGESTIONS = [("demo", "llama-3.2-1", "'llama-3.2-1b'"), ("demo", "llama", "'llama-3.2-1b' or 'llama-3-8b'")]


@pytest.mark.parametrize(("command", "name", "meant"), [*((c, "Tiny", "'tiny'") for c in COMMANDS), *SUGGESTIONS])
def test_every_command_suggests_a_name(
    command: str, name: str, meant: str, liger: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liger_hf.hub.hub_is_reachable", lambda: False)
    code, errors = liger(*COMMANDS[command][0], name, *(("--steps", "1") if command == "train" else ()))
    assert code == 2
    assert f"Did you mean {meant}?" in errors
    assert ("must be one of " if command == "demo" else "must be ") in errors
    assert ", ".join(PRESETS) in errors


@pytest.mark.slow
def test_inspecting_a_wrong_name_without_a_hub_is_one_sentence_soon() -> None:
    """No retries of the libraries, and without loading what only a model needs."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        code = (
            "import os, sys; os.environ['HF_ENDPOINT'] = sys.argv.pop()\n"
            "from liger_core.commands import main\n"
            "try: main()\n"
            "finally: print('torch._dynamo' in sys.modules)"
        )
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", code, "inspect", "notamodel", url], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 2
    assert done.stdout.split() == ["False"]
    assert "Retrying" not in done.stderr
    assert "got 'notamodel': no such folder, and the hub cannot be reached." in " ".join(done.stderr.split())
