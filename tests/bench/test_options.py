# SPDX-License-Identifier: Apache-2.0
"""Every numeric or path option of every command of liger-bench and liger-train, with nonsensical values; generated from
the commands."""

import importlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer

from bench.commands import InProcess
from liger_bench import plugin as bench_plugin
from liger_train import plugin as train_plugin

NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1" + 30 * "0")
# Options that are numbers within words.
WORDS = {("train", "--batch"), ("train", "--memory-limit"), ("train", "--gpus"), ("plan", "--memory-limit")}
# What a command cannot do without, and what an option needs to be looked at.
NEEDED = {
    "train": ["--model", "tiny", "--device", "cpu"],
    "plan": ["--model", "tiny"],
    "report": ["results"],
    "train --save-every": ["--output", "run"],
    "train --gpus": ["--sweep", "batch=1"],
}
ZERO_IS_A_VALUE = {
    *(f"{command} {option}" for command in ("train", "plan") for option in ("--save-every", "--seed", "--validation")),
    "bench ops --seconds",
    "bench scaling --seconds",
}
FOLDERS = {"train --output", "train --export", "train --out", "plan --out", "demo --out", "report --images"}
FOLDERS |= {f"bench {name} --out" for name in ("ops", "scaling", "sharded")}
FILES = {"train --csv", "report --html", "report --docs"}
FILES |= {f"bench {name} --csv" for name in ("ops", "scaling")}
READ = {"plan --compare", "report FOLDER..."}
# A plan takes every option of a run, and leaves these alone.
UNUSED = {"plan --output", "plan --export", "plan --csv"}
# They are words to typer.
NAMES = {"train --data", "train --model", "train --nvme-folder", "plan --model"}


@dataclass(frozen=True)
class Option:
    """One of a command: its name on the command line, and the types in its annotation."""

    command: str
    name: str
    kinds: set[Any]

    def __str__(self) -> str:
        return f"{self.command} {self.name}"

    def given(self, value: str) -> list[str]:
        """A command line on which all else is right."""
        needed = [] if self.name == "--compare" else NEEDED.get(self.command, [])
        words = [*self.command.split(), *needed, *NEEDED.get(str(self), [])]
        if not self.name.startswith("--"):
            return [*(word for word in words if word != "results"), value]
        return [*words, f"{self.name}={value}"]


def kinds(hint: Any) -> set[Any]:
    return {hint} | {kind for inside in get_args(hint) for kind in kinds(inside)} if get_args(hint) else {hint}


def options() -> Iterator[Option]:
    app = typer.Typer()
    for plugin in (bench_plugin, train_plugin):
        plugin.liger_commands(app)
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    for prefix, group in groups:
        for command in group.registered_commands:
            for name, parameter in inspect.signature(command.callback, eval_str=True).parameters.items():
                info = parameter.annotation.__metadata__[0]
                option = info.metavar if isinstance(info, typer.models.ArgumentInfo) else None
                option = option or next(iter(info.param_decls or ()), f"--{name.replace('_', '-')}")
                words = f"{prefix}{command.name or command.callback.__name__}"
                yield Option(words, option, kinds(get_args(parameter.annotation)[0]))


OPTIONS = list(options())
COUNTED = [option for option in OPTIONS if option.kinds & {int, float} or (option.command, option.name) in WORDS]
PATHS = [option for option in OPTIONS if Path in option.kinds]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder with results to read, where no model can be made."""

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError("a model was made")

    # These make modules when they are imported.
    importlib.import_module("transformers.activations")
    importlib.import_module("liger_hf.repeated")
    monkeypatch.setattr(torch.nn.Module, "__init__", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    trained = {"model": "tiny", "liger": "all", "checkpoint": "none"}
    trained |= dict.fromkeys(("machine", "versions", "commit", "date"), "")
    (tmp_path / "results" / "train.json").write_text(json.dumps([trained]))


def assert_refused(liger: InProcess, option: Option, value: str) -> None:
    code, errors = liger(*option.given(value))
    assert (code, option.name in errors) == (2, True), errors
    assert "Traceback" not in errors
    # A usage error has two lines before its sentence.
    assert len(errors.partition("Error ─")[2] or errors) < 500, errors


@pytest.mark.slow
@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("option", COUNTED, ids=str)
def test_a_number_that_makes_no_sense_raises_a_clear_error(liger: InProcess, option: Option, value: str) -> None:
    if value == "0" and (str(option) in ZERO_IS_A_VALUE or option.name == "--gpus"):
        pytest.skip("zero is a value")
    assert_refused(liger, option, value)


@pytest.mark.parametrize("option", [*PATHS, *(option for option in OPTIONS if str(option) in NAMES)], ids=str)
def test_an_empty_path_is_not_the_current_folder(liger: InProcess, option: Option) -> None:
    assert_refused(liger, option, "")


def test_every_path_is_known_to_be_read_or_written() -> None:
    assert {str(option) for option in PATHS} == FOLDERS | FILES | READ | UNUSED


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file", "file/inside", "link", "/proc/liger"])
@pytest.mark.parametrize("option", [option for option in PATHS if str(option) in FOLDERS | FILES], ids=str)
def test_a_place_that_cannot_be_written_to_raises_a_clear_error(liger: InProcess, option: Option, place: str) -> None:
    Path("file").write_text("")
    Path("link").symlink_to("not/there")
    if place == "file" and str(option) in FILES:
        Path("file").unlink()
        Path("file").mkdir()
    assert_refused(liger, option, place)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["file", "link", "results"]


@pytest.mark.parametrize("option", [option for option in PATHS if str(option) in READ], ids=str)
def test_a_file_that_is_not_there_raises_a_clear_error(liger: InProcess, option: Option) -> None:
    code, errors = liger(*option.given("not-there"))
    assert (code, "not-there" in errors, "Traceback" in errors) == (2, True, False), errors
