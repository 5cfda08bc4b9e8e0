# SPDX-License-Identifier: Apache-2.0
"""`liger train`: what a run reports, the defaults of the command, and the text that is read."""

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, masking_utils

from bench.commands import InProcess, assert_refused
from liger_bench import machine
from liger_train import auto_checkpoint, techniques
from liger_train.options import RunOptions
from liger_train.plan.step import predict
from liger_train.row import Row, row_of
from liger_train.runs import command, devices
from liger_train.runs import data as text_of_runs
from liger_train.runs.data import Data, read
from liger_train.runs.run import largest_batch, run
from liger_train.setup import Setup
from train.training import refused

WHERE = dict.fromkeys(("machine", "versions", "commit", "date"), "")


@pytest.fixture(scope="module")
def row(small: Setup) -> Row:
    return run(small)


def test_a_row_carries_its_setup_and_what_was_measured(row: Row, small: Setup) -> None:
    assert all(getattr(row, field.name) == getattr(small, field.name) for field in fields(Setup))
    assert row.low_tokens_per_second <= row.tokens_per_second <= row.high_tokens_per_second
    assert row.tokens_per_second == pytest.approx(2 * 16 / row.step_seconds, rel=0.5)
    assert (row.failed, row.out_of_memory, row.interrupted, row.reason) == (False, False, False, "")
    assert row.parameters == row.trainable_parameters > 0
    assert "linear_cross_entropy 1" in row.replaced
    assert None not in (row.machine, row.versions, row.commit)


def test_memory_is_measured_on_the_cpu(row: Row, small: Setup) -> None:
    # Weights, and two moments of each.
    assert row.static_bytes == pytest.approx(3 * 4 * row.parameters, rel=0.01)
    assert row.peak_bytes == pytest.approx(predict(small).peak_bytes, rel=0.05)
    assert row.peak_reserved_bytes is None


def test_a_single_step_has_a_peak_and_no_time(small: Setup, row: Row) -> None:
    alone = run(replace(small, steps=1))
    # Without the state of the optimizer, which this step makes when its activations are gone.
    assert 2 * 4 * (row.parameters or 0) < alone.peak_bytes < row.peak_bytes
    assert alone.tokens_per_second is None


def test_the_peak_before_a_run_was_resumed_counts(small: Setup, row: Row, tmp_path: Path) -> None:
    run(replace(small, steps=3), folder=tmp_path)
    (seal,) = tmp_path.glob("checkpoint-3/liger.json")
    progress = json.loads(seal.read_text())
    assert progress["peak_bytes"] == pytest.approx(row.peak_bytes, rel=0.01)
    seal.write_text(json.dumps(progress | {"peak_bytes": 1 << 40}))
    assert run(small, folder=tmp_path, resume=True).peak_bytes == 1 << 40


def test_a_batch_in_parts_has_the_losses_of_the_whole(small: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spender(TrainerCallback):
        parts = 2

    whole = run(replace(small, batch=3))
    monkeypatch.setattr(auto_checkpoint, "observers", lambda setup, note: [Spender()])
    assert run(replace(small, batch=3)).losses == pytest.approx(whole.losses, rel=1e-5)


def test_a_row_of_one_text_is_not_searched_for_packed_ones(small: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a sequence on a rank of --cp would pass for packed texts, whose mask has a byte for each pair of
    tokens."""
    searched: list[Any] = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", searched.append)
    assert run(replace(small, steps=1)).reason == ""
    assert searched == []


def test_once_fewer_layers_are_recomputed_the_timing_restarts(
    small: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spender(TrainerCallback):
        parts = 1

        def __init__(self, note: Callable[[str], object]) -> None:
            self.note = note

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                self.note("From here on it is faster.")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note("The end.")

    monkeypatch.setattr(auto_checkpoint, "observers", lambda setup, note: [Spender(note)])
    row = run(small, folder=tmp_path)
    assert row.notes[-2:] == ["From here on it is faster.", "The end."]
    # Of six steps the fourth is the first of the new kind, and not timed.
    assert len(json.loads((tmp_path / "checkpoint-6" / "liger.json").read_text())["timed"]) == 2


def asked(monkeypatch: pytest.MonkeyPatch, liger: InProcess, *arguments: str) -> tuple[Setup, list[str], str]:
    """The setup and the notes that the command trains with, and what it says."""
    seen: list[Any] = []

    def trained(setup: Setup, search: bool, options: Any, notes: list[str]) -> Row:
        seen.extend((setup, notes))
        return row_of(setup, WHERE, {"notes": notes})

    monkeypatch.setattr(command, "_train", trained)
    # The text need not be here.
    monkeypatch.setattr(command, "check_source", lambda source: None)
    place = lambda name, device: torch.device("cpu" if device == "cpu" else "cuda")  # noqa: E731
    monkeypatch.setattr(machine, "measurable_device", place)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    code, said = liger("train", *arguments)
    assert code == 0
    return seen[0], seen[1], said


@pytest.mark.parametrize(
    "setup",
    [
        Setup("tiny"),
        Setup("tiny", device="cpu", precision="fp32", checkpoint="none"),
        Setup("tiny", device="cpu"),
        Setup(
            "a folder", 3, 64, "text.txt", "none", "fp16", "4", "galore", "zero3", "nvme", "lora", 2, device="cuda",
            memory_limit=24 * 2**30, steps=7, learning_rate=1e-3, seed=5, nvme_folder="/disk",
            set="max_grad_norm=0.5 'run_name=a name'", compile="graphs", trust_remote_code=True, random_weights=True,
        ),
    ],
    ids=["bare", "cpu", "cpu_with_the_choices_of_a_gpu", "every_option"],
)  # fmt: skip
def test_the_command_of_a_setup_trains_that_setup(
    monkeypatch: pytest.MonkeyPatch, liger: InProcess, setup: Setup
) -> None:
    # Some of these cannot be combined.
    monkeypatch.setattr(techniques, "check", lambda setup: None)
    words = shlex.split(setup.command())
    assert words[:2] == ["liger", "train"]
    assert asked(monkeypatch, liger, *words[2:])[0] == setup


@pytest.mark.parametrize(
    ("words", "defaults", "sentence"),
    [
        (("--data", "text.txt"), ("cuda", "bf16", "full", "all"), "NVIDIA Test: --device cuda, --liger all, --precision bf16, --checkpoint full."),
        (("--device", "cpu"), ("cpu", "fp32", "none", "all"), "the CPU: --liger all, --precision fp32, --checkpoint none."),
    ],
    ids=["bf16 and checkpointing on a GPU", "neither on the CPU"],
)  # fmt: skip
def test_defaults_depend_on_the_device_and_are_printed(
    words: tuple[str, ...], defaults: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, liger: InProcess
) -> None:
    setup, notes, said = asked(monkeypatch, liger, "--model", "llama-3.2-1b", *words)
    assert (setup.device, setup.precision, setup.checkpoint, setup.liger) == defaults
    assert notes == [f"Defaults for {sentence}"]
    assert notes[0] in said


def test_a_gpu_without_bfloat16_gets_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    words = {"device": "cuda", "liger": "all", "precision": None, "checkpoint": "full"}
    assert command._defaults(words, RunOptions(), torch.device("cuda"))[0]["precision"] == "fp16"


@pytest.mark.parametrize(
    ("changes", "environment", "expected"),
    [
        ({}, {}, ["expandable_segments:True"]),
        ({"compile": "graphs"}, {}, []),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, []),
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, []),
    ],
)
def test_segments_of_the_allocator_grow_unless_somebody_configures_it(
    changes: dict[str, Any], environment: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(devices, "set_allocator_settings", said.append)
    for name in devices.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    devices._expand_segments(Setup("tiny", **changes))
    assert said == expected


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--batch", "auto"), "--batch auto needs a GPU"),
        (("--sequence", "auto"), "train: --sequence must be a number, got auto; `liger plan --sequence auto` finds one that fits"),
        (("--ranks", "auto"), "train: --ranks must be a number, got auto; `liger plan --ranks auto` finds one that fits"),
        (("--sequence", "-1"), "train: --sequence must be a number, got '-1'"),
        (("--resume",), "--resume needs --output"),
        (("--save-every", "2"), "--save-every needs --output"),
        (("--memory-limit", "24GiB"), "--memory-limit needs a GPU, got --device cpu"),
        (("--data", "no/such/file"), "--data must be a file, a folder, a dataset saved by datasets, or library, got no/such/file"),
        (("--data", "/dev/null"), "got /dev/null, which is neither a file nor a folder; save its output to a file"),
    ],
)  # fmt: skip
def test_a_wrong_option_raises_a_clear_error(liger: InProcess, arguments: tuple[str, ...], sentence: str) -> None:
    assert_refused(liger, sentence, "train", "--model", "tiny", "--device", "cpu", *arguments)


@pytest.mark.parametrize(("fits", "found", "tried"), [(8, 8, [8]), (4, 4, [8, 6, 4]), (0, 1, [8, 6, 4, 3, 2, 1])])
def test_the_search_ends_at_the_first_batch_that_fits(small: Setup, fits: int, found: int, tried: list[int]) -> None:
    seen: list[int] = []

    def attempt(setup: Setup) -> Row:
        seen.append(setup.batch)
        return row_of(setup, WHERE, {"out_of_memory": setup.batch > fits})

    row = largest_batch(replace(small, batch=8), attempt)
    assert (row.batch, seen, row.out_of_memory) == (found, tried, fits == 0)
    assert row.notes[-1].startswith(f"--batch auto: {found}")


def data_of(setup: Setup, source: Path | str, vocabulary: int = 400, **changes: Any) -> Data:
    return read(replace(setup, data=str(source), **changes), vocabulary, own_tokenizer=False)


def test_a_folder_is_read_in_order_and_its_binary_files_are_named(small: Setup, tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog\n" * 40
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text(text)
    (tmp_path / "a.txt").write_text(text.upper())
    (tmp_path / ".hidden").write_text("hidden " * 100)
    for name in ("image.png", "model.bin", "x.gz", "z.so"):
        (tmp_path / name).write_bytes(b"\x89PNG\0\1")
    data = data_of(small, tmp_path)
    assert data.notes == [f"Files in {tmp_path} that are not text were skipped: image.png, model.bin, x.gz and 1 more."]
    words = data.tokenizer.decode(data.sequences.flatten())
    assert words.startswith("THE QUICK")
    assert words.index("DOG") < words.index("fox")
    assert "hidden" not in words


@pytest.mark.parametrize("content", [b"\x89PNG\0\1", b""], ids=["binary", "empty"])
def test_a_file_that_is_not_text_raises_a_clear_error(small: Setup, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with refused(r"--data must be a file of text, got .*file, which is empty, binary or cannot be read"):
        data_of(small, tmp_path / "file")


def test_a_text_is_cut_into_whole_steps(small: Setup, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("short")
    with refused(r"the text must have at least the 4 × 16 tokens of a step, got [0-9]+ from .*; use more text"):
        data_of(small, tmp_path / "file", accumulation=2)
    (tmp_path / "file").write_text("some words of a text " * 300)
    data = data_of(small, tmp_path / "file", accumulation=3)
    assert data.sequences.shape[0] % 6 == 0
    assert data.sequences.shape[1] == 16
    assert data.digest != data_of(small, tmp_path / "file").digest


@pytest.fixture
def short_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a cache of its own, and a standard library of a few files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = [f"def function_{i}(argument):\n    return argument\n" * 20 for i in range(9)]
    monkeypatch.setattr(text_of_runs, "library", lambda: texts)
    return tmp_path / "cache" / "liger"


def test_the_tokens_of_the_standard_library_are_kept_for_later_runs(
    small: Setup, short_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data_of(small, "library")
    assert len(list(short_library.iterdir())) == 1
    monkeypatch.setattr(text_of_runs, "trained_tokenizer", lambda *_: pytest.fail("the tokenizer was trained again"))
    monkeypatch.setattr(text_of_runs, "_tokens", lambda *_: pytest.fail("the text was tokenized again"))
    second = data_of(small, "library")
    assert torch.equal(second.sequences, first.sequences)
    assert second.digest == first.digest
    assert second.tokenizer.backend_tokenizer.to_str() == first.tokenizer.backend_tokenizer.to_str()
    for name in ("eos_token", "pad_token"):
        assert getattr(second.tokenizer, name) == getattr(first.tokenizer, name)


def test_a_damaged_cache_is_made_again_and_one_that_cannot_be_written_is_none(
    small: Setup, short_library: Path
) -> None:
    first = data_of(small, "library")
    (kept,) = short_library.iterdir()
    kept.write_bytes(b"half of a file")
    assert data_of(small, "library").digest == first.digest
    assert kept.stat().st_size > 100
    shutil.rmtree(short_library.parent)
    short_library.parent.write_text("a file, not a folder")
    assert data_of(small, "library").sequences.numel() > 0


def test_another_text_or_vocabulary_has_tokens_of_its_own(
    small: Setup, short_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_of(small, "library")
    data_of(small, "library", vocabulary=350)
    monkeypatch.setattr(text_of_runs, "library", lambda: ["other words\n" * 400])
    data_of(small, "library")
    assert len(list(short_library.iterdir())) == 3


def test_the_train_split_of_a_saved_dataset_is_read(small: Setup, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        name: datasets.Dataset.from_dict({"number": [1] * 9, "text": [f"{name} words "] * 9})
        for name in ("test", "train")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    data = data_of(small, tmp_path / "saved", sequence=8)
    assert "train words" in data.tokenizer.decode(data.sequences.flatten())
    assert "test" not in data.tokenizer.decode(data.sequences.flatten())
    assert data.notes == [
        f"Training on the split 'train' of the dataset {tmp_path / 'saved'}.",
        f"Training on the column text of {tmp_path / 'saved'}; not used: number.",
    ]


def test_a_model_with_a_tokenizer_is_trained_on_its_own_tokens(small: Setup, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("own words of the tokenizer " * 50)
    own = data_of(small, text).tokenizer
    own.add_special_tokens({"eos_token": "<end>"})
    own.save_pretrained(tmp_path / "model")
    setup = replace(small, model=str(tmp_path / "model"), data=str(text), batch=1)
    data = read(setup, vocabulary=400, own_tokenizer=True)
    assert data.notes == []
    assert data.tokenizer.eos_token == "<end>"
    with refused("the tokens must be below 100"):
        read(replace(small, model=str(tmp_path / "model"), data=str(text), batch=1), vocabulary=100, own_tokenizer=True)


@pytest.mark.slow
def test_a_config_is_enough_to_train_from_random_weights(small: Setup, model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    bare = replace(small, model=str(tmp_path), steps=2)
    with refused(r"there is no tokenizer\.json; .*, or use --random-weights"):
        run(bare)
    (tmp_path / "tokenizer.json").write_text((model / "tokenizer.json").read_text())
    with refused(r"no file named model\.safetensors.*; --random-weights takes only its config\."):
        run(bare)
    one, same, other = (run(replace(bare, random_weights=True, seed=seed)) for seed in (0, 0, 1))
    assert not one.failed, one.reason
    assert one.losses == same.losses != other.losses


def test_a_saved_tokenizer_pads_a_batch_and_its_model_knows_its_tokens(small: Setup, tmp_path: Path) -> None:
    run(replace(small, steps=1), folder=tmp_path)
    tokenizer, model = (
        kind.from_pretrained(tmp_path / "checkpoint-1") for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    batch = tokenizer(["A step", "A step reads a batch of sequences"], padding=True)
    short, long = batch["input_ids"]
    assert len(short) == len(long)
    assert batch["attention_mask"][0][-1] == 0
    assert short[-1] not in long
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert tokenizer.decode([0, 1]) == "<|endoftext|><|pad|>"


def test_each_text_ends_with_the_token_for_it(small: Setup, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("some words of a text " * 30)
    ids = data_of(small, tmp_path, batch=1).sequences.flatten().tolist()
    one = ids[: ids.index(0) + 1]
    assert len(one) < len(ids)
    assert ids == (one + one)[: len(ids)]
