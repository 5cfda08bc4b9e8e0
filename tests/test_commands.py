# SPDX-License-Identifier: Apache-2.0
"""The command `liger` itself: what it prints of versions, plugins and the selection, and what a broken plugin leaves of
it."""

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [
    pytest.mark.usefixtures("fresh_selection"),
    pytest.mark.filterwarnings("ignore:plugin|command:RuntimeWarning"),
]

Install = Callable[..., Path]
COMMAND = """
    from liger_core import hookimpl

    @hookimpl
    def liger_commands(app):
        @app.command()
        def NAME():
            print("hello")
        AND_THEN
"""
GREET = COMMAND.replace("NAME", "greet").replace("AND_THEN", "")
DRIFTED = """
    import liger_core

    @liger_core.hookimpl
    def liger_backends():
        return [liger_core.Backend("third", ("cpu",), 50, {liger_core.rms_norm: lambda x, weight: x})]
"""


class Done(NamedTuple):
    """How a command ended, and what it wrote, as one line each."""

    code: int
    out: str
    err: str


Liger = Callable[..., Done]


@pytest.fixture
def liger(liger_output: Callable[..., tuple[int, str, str]]) -> Liger:
    def run(*arguments: str) -> Done:
        code, out, err = liger_output(*arguments)
        return Done(code, " ".join(out.split()), err)

    return run


def test_version_prints_the_packages_without_importing_them() -> None:
    code = "import sys; from liger_core.commands import main; sys.argv = ['liger', '--version']\ntry: main()\n"
    code += "finally: print({'triton', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    *lines, imported = done.stdout.splitlines()
    assert lines[0] == f"liger-core {importlib.metadata.version('liger-core')}"
    own = [f"liger-{name}" for name in ("core", "triton", "inductor", "hf", "bench", "train", "verify")]
    assert [line.split()[0] for line in lines] == [*own, "torch", "triton", "transformers"]
    assert imported == "set()"


def test_version_says_what_is_not_installed(liger: Liger, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "transformers":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert liger("--version").out.endswith(" transformers not installed")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_a_command_with_a_sentence() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "liger_core", "ops"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "liger: not everything could be written: No space left on device\n"


def test_doctor_prints_the_diagnosis_with_a_wrong_variable_which_other_commands_name(
    liger: Liger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_BACKEND", "tritn")
    done = liger("doctor")
    assert done.code == 1
    assert re.search(r"torch \d.*devices: .*backend.*reference.*liger-core.*LIGER_BACKEND: tritn", done.out)
    sentence = r"LIGER_BACKEND=tritn: no backend named 'tritn'; installed: [a-z, ]*triton\. Did you mean 'triton'\?"
    assert re.search(f"error: {sentence}", done.out)
    report = json.loads(liger("doctor", "--json").out)
    assert re.match(sentence, report["selection_error"])
    assert report["selected"] == {}
    assert report["versions"]["liger-core"]
    other = liger("ops")
    assert other.code == 2
    assert other.err.startswith("BackendError: LIGER_BACKEND=tritn: no backend named 'tritn'")


def test_doctor_is_content_with_a_sound_installation(liger: Liger) -> None:
    done = liger("doctor", "--json")
    report = json.loads(done.out)
    assert done.code == 0
    assert (report["failed_plugins"], report["selection_error"], report["notes"]) == ({}, None, [])
    assert report["selected"]["rms_norm"] == "auto"


@pytest.mark.filterwarnings("ignore:Liger is tested with")
def test_doctor_names_untested_versions(liger: Liger, monkeypatch: pytest.MonkeyPatch) -> None:
    required = importlib.metadata.requires
    old = {"liger-core": ["torch<2,>=1"]}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: old.get(name) or required(name))
    (sentence,) = json.loads(liger("doctor", "--json").out)["untested_versions"]
    assert sentence.startswith("Liger is tested with torch<2,>=1, got ")
    assert f"untested versions: {sentence}" in liger("doctor").out


def test_doctor_lists_a_backend_that_was_left_out(liger: Liger, install: Install) -> None:
    install("drifted", DRIFTED)
    done = liger("doctor")
    assert done.code == 1
    fault = "backend 'third': rms_norm must have the signature of its reference"
    assert f"error: plugin 'drifted' of liger-drifted: {fault}" in done.out


def test_doctor_notes_a_disabled_plugin_that_is_not_installed(liger: Liger, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_bench")
    monkeypatch.setenv("LIGER_DISABLE_PLUGINS", "bnch")
    done = liger("doctor")
    assert done.code == 0
    sentence = r"no plugin named 'bnch'; installed: .*bench.*\. Did you mean 'bench'\?"
    assert re.search(f"note: LIGER_DISABLE_PLUGINS: {sentence}", done.out)
    assert "is disabled" not in done.out


def test_a_plugin_adds_a_command(liger: Liger, install: Install) -> None:
    install("greeting", GREET)
    assert liger("greet") == Done(0, "hello", "")


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        pytest.param(COMMAND.replace("NAME", "greet").replace("AND_THEN", "1 / 0"), "its hook liger_commands failed: ZeroDivisionError: division by zero", id="raises"),
        pytest.param(COMMAND.replace("NAME", "greet").replace("AND_THEN", "raise SystemExit(3)"), "its hook liger_commands failed: SystemExit: 3", id="exits"),
        pytest.param(COMMAND.replace("NAME()", "greet(value: '1 / 0')").replace("AND_THEN", ""), "building its commands failed: ZeroDivisionError: division by zero", id="cannot_be_built"),
        pytest.param("raise SystemExit(3)", "importing wrong_plugin failed: SystemExit: 3", id="exits_at_import"),
    ],
)  # fmt: skip
def test_a_plugin_whose_commands_fail_loses_these_alone(
    liger: Liger, install: Install, source: str, fault: str
) -> None:
    install("good", COMMAND.replace("NAME", "welcome").replace("AND_THEN", ""))
    install("wrong", source)
    fault = f"plugin 'wrong' of liger-wrong: {fault}"
    sentence = f"^{re.escape(fault)}. Ignoring (its commands|the plugin); set LIGER_DISABLE_PLUGINS=wrong to "
    with pytest.warns(RuntimeWarning, match=sentence):
        assert liger("welcome") == Done(0, "hello", "")
    done = liger("doctor", "--json")
    assert done.code == 1
    assert json.loads(done.out)["failed_plugins"] == {"wrong": [fault]}
    assert liger("greet").code == 2


def test_a_command_of_this_project_cannot_be_replaced(liger: Liger, install: Install) -> None:
    install("wrong", COMMAND.replace("NAME", "doctor").replace("AND_THEN", ""))
    done = liger("doctor", "--json")
    both = "plugin 'core' of liger-core and plugin 'wrong' of liger-wrong"
    fault = f"command 'doctor' must be offered once, got it from {both}"
    assert json.loads(done.out)["failed_plugins"] == {"wrong": [fault]}


def test_of_two_commands_of_one_name_neither_is_there_and_both_are_blamed(liger: Liger, install: Install) -> None:
    for name in ("two", "one"):
        install(name, GREET)
    fault = "command 'greet' must be offered once, got it from plugin 'one' of liger-one and plugin 'two' of liger-two"
    assert json.loads(liger("doctor", "--json").out)["failed_plugins"] == {"one": [fault], "two": [fault]}
    assert liger("greet").code == 2


def test_a_sentence_in_brackets_is_not_markup(liger: Liger, install: Install) -> None:
    install("wrong", "raise OSError('[bold] is missing')")
    assert "OSError: [bold] is missing" in liger("doctor").out
