# SPDX-License-Identifier: Apache-2.0
"""`liger demo`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path

import matplotlib.image
import pytest
import torch

from bench.commands import Finished, InProcess
from liger_bench.demo.command import _print
from liger_bench.demo.measure import speed_is_clear, tokens_per_second
from liger_bench.demo.model import build, twin
from liger_bench.demo.run import _judged
from liger_bench.demo.settings import Settings
from liger_bench.demo.train import train
from liger_bench.text import Sequences, library_text

KEYS = (
    "loss_hf",
    "loss_liger",
    "max_loss_difference",
    "peak_memory_hf_bytes",
    "peak_memory_liger_bytes",
    "tokens_per_second_hf",
    "tokens_per_second_liger",
    "backend",
    "device",
)


def test_demo_ends_well(tiny_demo: Finished) -> None:
    assert tiny_demo.code == 0, tiny_demo.errors


def test_demo_prints_one_json_object(tiny_demo: Finished) -> None:
    assert isinstance(json.loads(tiny_demo.printed), dict)


@pytest.mark.parametrize("key", KEYS)
def test_demo_result_has_key(tiny_demo: Finished, key: str) -> None:
    assert tiny_demo.result[key] is not None


def test_demo_trains_on_every_step(tiny_demo: Finished) -> None:
    losses = tiny_demo.result["losses_hf"]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.1


def test_demo_starts_at_the_loss_of_a_uniform_guess(tiny_demo: Finished) -> None:
    assert tiny_demo.result["losses_hf"][0] == pytest.approx(math.log(32000), abs=0.1)


def test_liger_has_the_loss_of_the_baseline(tiny_demo: Finished) -> None:
    result = tiny_demo.result
    largest = max(abs(a - b) for a, b in zip(result["losses_hf"], result["losses_liger"], strict=True))
    assert result["max_loss_difference"] == largest <= 1e-3


def test_demo_says_in_a_log_what_it_does(tiny_demo: Finished) -> None:
    said = tiny_demo.errors.splitlines()
    assert any(line.startswith("loading Transformers · 0:00:0") for line in said)
    assert re.match(r"step \d+/\d+ · measuring memory · 0:\d\d:\d\d$", said[-1])


# What libraries say that the demo does not need, and that look like failures.
ALARMING = ("Failed to load", "torch/utils/_pytree.py", "gemm_4bit", "real_accelerator", "Warning", "[WARNING]")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is not None for name in ("torchao", "bitsandbytes")),
    reason="the environment of the demo has neither torchao nor bitsandbytes, which warn when they are imported",
)
def test_demo_says_nothing_alarming(tiny_demo: Finished) -> None:
    assert [line for line in tiny_demo.errors.splitlines() if any(words in line for words in ALARMING)] == []


def test_each_step_says_its_loss_and_speed() -> None:
    settings = Settings(
        "tiny",
        torch.device("cpu"),
        torch.float32,
        steps=2,
        batch=4,
        sequence=32,
        learning_rate=1e-3,
        checkpointing=False,
    )
    data = Sequences(library_text(4, 32, limit=300_000).sequences)
    for pieces in (1, 2):
        said: list[str] = []
        losses = train(build(settings), data, settings, said.append, pieces=pieces)
        assert [re.sub(r"[\d,]+ tokens", "N tokens", state) for state in said] == [
            f"loss {loss:.4f}, N tokens/s" for loss in losses
        ]


@pytest.mark.parametrize(
    ("plain", "liger", "clear"),
    [
        ([1.0, 1.1, 1.2], [1.0, 1.0, 1.0], True),
        ([1.9, 17.0, 4.0], [1.0, 1.0, 1.0], False),
        ([1.0] * 3, [1.0, 1.5, 2.0], False),
    ],
)
def test_a_speed_is_clear_if_steps_took_about_as_long_as_each_other(
    plain: list[float], liger: list[float], clear: bool
) -> None:
    assert speed_is_clear([plain, liger]) is clear


def test_an_unclear_speed_is_called_so(tiny_demo: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for clear in (True, False):
        steps = {"step_seconds_hf": [1.9, 17.0], "step_seconds_liger": [2.0, 3.0]}
        _print(tiny_demo.result | steps | {"speed_is_clear": clear}, tmp_path)
        text = capsys.readouterr().out
        assert ("(unclear)" in text) is not clear
        assert ("Steps took between 1.90 and 17.00 s: other processes used the machine" in text) is not clear
        assert "On a CPU Liger saves memory, not time" in text


def test_demo_replaces_something(tiny_demo: Finished) -> None:
    assert "linear_cross_entropy" in tiny_demo.result["report"]


def test_memory_of_the_baseline_loss_is_three_times_the_logits(tiny_demo: Finished) -> None:
    logits = 2 * 64 * 32000 * 4
    # Beside the logits and what the loss makes of them there are the gradients of head and hidden states.
    gradients = (32000 + 2 * 64) * 256 * 4
    assert 3 * logits <= tiny_demo.result["peak_loss_memory_hf_bytes"] <= 3 * logits + gradients + logits // 2


def test_a_step_holds_parameters_gradients_and_optimizer_state(tiny_demo: Finished) -> None:
    result = tiny_demo.result
    assert result["peak_memory_liger_bytes"] >= 4 * 4 * result["parameters"]


@pytest.mark.parametrize("name", ["loss.png", "memory.png"])
def test_picture_shows_something(tiny_demo: Finished, name: str) -> None:
    pixels = matplotlib.image.imread(tiny_demo.folder / name)
    assert min(pixels.shape[:2]) > 300
    assert pixels[..., :3].std() > 0.05


def test_result_file_holds_what_was_printed(tiny_demo: Finished) -> None:
    assert json.loads((tiny_demo.folder / "result.json").read_text()) == tiny_demo.result


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        (
            "--model",
            "7b",
            (
                "demo: --model must be one of tiny, small, llama-3.2-1b, llama-3-8b, qwen2-7b, gemma-7b, mistral-7b, "
                "phi-3-mini, got '7b'"
            ),
        ),
        ("--device", "tpu", "demo: --device must be auto, cpu or cuda, got 'tpu'"),
        ("--dtype", "int8", "demo: --dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ("--steps", "0", "Invalid value for '--steps'"),
    ],
)
def test_wrong_usage_ends_with_2(liger: InProcess, tmp_path: Path, option: str, value: str, sentence: str) -> None:
    code, errors = liger("demo", "--out", str(tmp_path), option, value)
    assert code == 2
    assert sentence in errors


def test_a_difference_above_the_bound_fails() -> None:
    assert not _judged({"plain": [10.0, 9.0], "liger": [10.0, 9.002]})["passed"]


def test_a_loss_that_is_not_a_number_fails() -> None:
    assert not _judged({"plain": [10.0, math.nan], "liger": [10.0, math.nan]})["passed"]


def test_a_low_precision_is_judged_by_the_noise_of_reordered_sums() -> None:
    judged = _judged({"plain": [10.0, 9.0], "liger": [10.0, 9.02], "noise": [10.0, 9.01]})
    assert judged["loss_difference_bound"] == pytest.approx(3 * 0.01)
    assert judged["passed"]


def test_the_text_is_the_same_every_time() -> None:
    one, two = (library_text(2, 64, limit=200_000) for _ in range(2))
    assert torch.equal(one.sequences, two.sequences)


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 1.0), ("cuda", 2.0)], ids=["fastest_on_cpu", "median_on_gpu"])
def test_speed_is_taken_from(device: str, seconds: float) -> None:
    assert tokens_per_second(100, [4.0, 1.0, 2.0], torch.device(device)) == 100 / seconds


def test_twins_train_the_same_parameters() -> None:
    settings = Settings("small", torch.device("cpu"), torch.float32, 1, 1, 8, 1e-3, checkpointing=True)
    model = build(settings)
    other = twin(model, settings)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    ids = torch.arange(8)[None]
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)


def test_halves_of_a_batch_have_the_loss_of_the_batch() -> None:
    settings = Settings("small", torch.device("cpu"), torch.float32, 2, 2, 16, 1e-3, checkpointing=False)
    data = Sequences(torch.arange(128).view(8, 16))
    whole, halves = (train(build(settings), data, settings, lambda state: None, pieces=pieces) for pieces in (1, 2))
    assert halves == pytest.approx(whole, abs=1e-4)
