# SPDX-License-Identifier: Apache-2.0
"""`liger train` and `liger plan` have the same options: a command line of one is a command line of the other."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import typer.main

from liger_bench import machine
from liger_core.errors import OptionError
from liger_train import errors, techniques
from liger_train.options import GROUPS
from liger_train.plan import command as plan_command
from liger_train.plugin import liger_commands
from liger_train.row import row_of
from liger_train.runs import command as train_command
from liger_train.setup import Setup
from liger_verify.plugin import liger_commands as verify_commands

WHERE = dict.fromkeys(("machine", "versions", "commit", "date"), "")
# A command line with each option of `liger train`, beside --model.
LINES = {
    "random_weights": "--random-weights", "trust_remote_code": "--trust-remote-code", "data": "--data text.txt",
    "validation": "--validation 0.02", "packing": "--packing", "batch": "--batch 4", "sequence": "--sequence 64",
    "accumulation": "--accumulation 2", "steps": "--steps 7", "learning_rate": "--learning-rate 1e-3",
    "seed": "--seed 5", "set": "--set weight_decay=0.1 --set max_grad_norm=2", "deterministic": "--deterministic",
    "liger": "--liger none", "precision": "--precision fp32", "checkpoint": "--checkpoint 1",
    "compile": "--compile default", "mlp": "--mlp tiled", "optimizer": "--optimizer adafactor",
    "adapter": "--adapter lora", "adapter_rank": "--adapter lora --adapter-rank 8",
    "adapter_alpha": "--adapter lora --adapter-alpha 8",
    "adapter_targets": "--adapter lora --adapter-targets q_proj,v_proj", "device": "--device auto",
    "memory_limit": "--memory-limit 160MiB", "ranks": "--ranks 1", "shard": "--shard fsdp2", "tp": "--tp 1",
    "cp": "--cp 1", "replicate": "--replicate 1", "offload": "--shard fsdp2 --offload parameters",
    "nvme_folder": "--shard zero3 --offload nvme --nvme-folder on/the/other/machine", "output": "--output model",
    "export": "--export model", "save_every": "--output model --save-every 2", "resume": "--output model --resume",
    "out": "--out results", "csv": "--csv rows.csv", "as_json": "--json", "snapshot": "--out results --snapshot",
    "profile": "--out results --profile", "sweeps": "--sweep batch=1,2",
    "strategies": "--strategies none,rms_norm+rope", "gpus": "--sweep batch=1 --gpus 0,1",
    "skip_larger": "--sweep batch=1 --skip-larger",
}  # fmt: skip
app = typer.Typer()
liger_commands(app)
verify_commands(app)
COMMANDS: Any = typer.main.get_command(app)


def options_of(name: str) -> dict[str, tuple[str, str, str]]:
    """Option → its group in the help, its names and type, and what it means, with its default."""
    command = COMMANDS.commands[name]
    context = typer.Context(command, info_name=name)
    return {each.name: (each.rich_help_panel, *each.get_help_record(context)) for each in command.params}


def run(command: str, line: str) -> None:
    assert not COMMANDS.main([command, "--model", "tiny", *shlex.split(line)], standalone_mode=False)


def test_every_option_of_train_is_one_of_plan_with_the_same_help_and_default() -> None:
    train, plan = options_of("train"), options_of("plan")
    # A plan that compares has no model.
    group, names, meaning = train.pop("model")
    assert plan.pop("model") == (group, names, meaning.removesuffix("  [required]"))
    assert {name: plan[name] for name in train} == train
    assert plan.keys() - train.keys() == {"techniques", "compare", "serve", "nodes", "links", "network"}


def test_options_that_verify_has_too_mean_the_same() -> None:
    train, verify = options_of("train"), options_of("verify")
    for name in ("sequence", "accumulation", "tp", "cp"):
        # Some are of a plan also auto.
        assert train[name][2].partition("  [")[0].startswith(verify[name][2].partition("  [")[0].rstrip("."))


def test_every_option_is_in_a_group_of_the_help() -> None:
    options = options_of("train")
    assert [name for names in GROUPS.values() for name in names] == list(options) == ["model", *LINES]
    assert not any("{" in meaning for _, _, meaning in options.values())


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[Setup]:
    """The setups that the two commands train and plan, instead of doing so."""
    seen: list[Setup] = []

    def trained(setup: Setup, *more: Any) -> Any:
        seen.append(setup)
        return row_of(setup, WHERE, {})

    def swept(setup: Setup, *more: Any, **others: Any) -> None:
        seen.append(setup)

    monkeypatch.setattr(train_command, "_train", trained)
    monkeypatch.setattr(train_command, "sweep", swept)
    # Neither packages nor the text need be here. A plan is checked as always.
    monkeypatch.setattr(techniques, "check", lambda setup: None)
    monkeypatch.setattr(train_command, "check_source", lambda source: None)
    monkeypatch.setattr(plan_command, "_plan", swept)
    monkeypatch.setattr(plan_command, "_plan_sweep", swept)
    monkeypatch.setattr(machine, "measurable_device", lambda name, device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    return seen


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_command_line_of_train_is_one_of_plan(
    line: str, setups: list[Setup], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("train", "plan"):
        run(command, line)
    trained, planned = setups
    if "--sweep" in line or "--strategies" in line:
        # The steps of a sweep differ from those of one run, and no plan depends on them.
        assert trained.steps < planned.steps
        trained = replace(trained, steps=planned.steps)
    assert trained == planned


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--batch many", "--batch must be a number or auto, got 'many'"),
        ("--sequence 1", "--sequence must be from 2 to"),
        ("--memory-limit 24", "--memory-limit must be a size like 24GiB or 512MB, got '24', which needs a unit"),
        ("--optimizer adamww", "--optimizer must be one of"),
        ("--set weight_decay", "--set must be a name and a value, for instance weight_decay=0.1, got 'weight_decay'"),
        ("--set weight_decai=1", "--set must name a field of transformers.TrainingArguments, got 'weight_decai'"),
        ("--adapter-rank 8", "--adapter-rank needs --adapter lora or qlora, got none"),
        ("--shard fsdp2 --precision fp16 --optimizer galore", "--optimizer galore cannot be combined with --shard"),
        ("--sweep batch=0", "--sweep batch must have positive numbers, got '0'"),
        ("--sweep bach=1", "Did you mean 'batch'?"),
    ],
)
def test_a_wrong_option_has_the_same_error_in_both_commands(
    line: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measurable_device", lambda name, device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    said = {}
    for command in ("train", "plan"):
        with pytest.raises(OptionError, match=f"^{command}: ") as raised:
            run(command, line)
        said[command] = str(raised.value).removeprefix(f"{command}: ")
    assert sentence in said["train"]
    assert said["plan"] == said["train"]


def test_what_both_commands_read_names_neither_in_its_errors() -> None:
    files = Path(errors.__file__).parent.glob("*.py")
    assert [file.name for file in files if any(f'"{name}: ' in file.read_text() for name in ("train", "plan"))] == []
    assert str(errors.SetupError("--batch must be 1")) == "train: --batch must be 1"


def test_another_number_of_ranks_than_those_that_run_is_an_error_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(OptionError, match="got 4; run it under torchrun --nproc-per-node 4 -m liger_core train"):
        run("train", "--device cpu --ranks 4")


def test_only_the_first_rank_of_torchrun_plans(setups: list[Setup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "0", "1":
        monkeypatch.setenv("RANK", rank)
        run("plan", "--shard fsdp2")
    assert [setup.ranks for setup in setups] == [2]
