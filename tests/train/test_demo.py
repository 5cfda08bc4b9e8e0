# SPDX-License-Identifier: Apache-2.0
"""`liger demo`: what it prints, what it writes, and how it ends."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch

from bench.commands import START, Finished, InProcess, assert_refused
from liger_hf.presets import PRESETS
from liger_train.demo.command import _print
from liger_train.demo.run import EagerAttention, compare_losses, speed_is_clear
from liger_train.model import build
from liger_train.row import row_of
from liger_train.setup import Setup
from train.answers import WHERE

pytestmark = pytest.mark.slow

KEYS = (
    "loss_hf", "loss_liger", "max_loss_difference", "peak_memory_hf_bytes", "peak_memory_liger_bytes",
    "tokens_per_second_hf", "tokens_per_second_liger", "backend", "device",
)  # fmt: skip


# The environment of the demo has none of these libraries, which warn when they are imported.
AS_IN_THE_DEMO = """
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in ("torchao", "bitsandbytes", "deepspeed") else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A demo of six short steps on the CPU: enough for the loss to fall whatever the text."""
    folder = tmp_path_factory.mktemp("demo")
    command = f"demo --steps 6 --batch 2 --sequence 64 --device cpu --json --out {folder}".split()
    # Includes what libraries print while they are imported.
    start = [sys.executable, "-c", f"{AS_IN_THE_DEMO}\n{START}"]
    done = subprocess.run([*start, *command], capture_output=True, text=True, timeout=300)
    return Finished(done.returncode, done.stdout, done.stderr, folder)


def test_demo_prints_one_json_object_with_the_results_that_its_file_has(tiny_demo: Finished) -> None:
    assert tiny_demo.code == 0, tiny_demo.errors
    printed = json.loads(tiny_demo.printed)
    assert json.loads((tiny_demo.folder / "result.json").read_text()) == printed == tiny_demo.result
    assert [key for key in KEYS if printed.get(key) is None] == []
    assert "linear_cross_entropy" in printed["replaced"]


def test_losses_fall_from_that_of_a_uniform_guess_and_are_the_same_with_liger(tiny_demo: Finished) -> None:
    losses = tiny_demo.result["losses_hf"]
    assert len(losses) == 6
    assert losses[0] == pytest.approx(math.log(32000), abs=0.1)
    assert losses[-1] < losses[0] - 0.1
    largest = max(abs(a - b) for a, b in zip(losses, tiny_demo.result["losses_liger"], strict=True))
    assert tiny_demo.result["max_loss_difference"] == largest <= 1e-3


# All that a demo says: what it does, and how far it is.
SAID = r"(.* · )?[^·]+ · \d:\d\d:\d\d|Training with(out)? Liger"


def test_demo_says_in_a_log_what_it_does_and_nothing_alarming(tiny_demo: Finished) -> None:
    said = tiny_demo.errors.splitlines()
    assert any(line.startswith("loading Transformers · 0:00:0") for line in said)
    assert [line for line in said if line.startswith("Training")] == ["Training without Liger", "Training with Liger"]
    assert re.match(r"measuring the memory of LM head and loss · 0:\d\d:\d\d$", said[-1])
    assert [line for line in said if not re.fullmatch(SAID, line)] == []


@pytest.mark.parametrize(("low", "high", "clear"), [(100.0, 120.0, True), (100.0, 126.0, False), (None, None, False)])
def test_a_speed_is_clear_if_steps_took_about_as_long_as_each_other(
    low: float | None, high: float | None, clear: bool
) -> None:
    speeds = {"low_tokens_per_second": low, "high_tokens_per_second": high}
    assert speed_is_clear(row_of(Setup("tiny"), WHERE, speeds)) is clear


def test_an_unclear_speed_is_called_so(tiny_demo: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for clear in (True, False):
        _print(tiny_demo.result | {"speed_is_clear": clear}, tmp_path)
        text = capsys.readouterr().out
        assert ("(unclear)" in text) is not clear
        assert ("because other processes used the machine; the speeds say little." in text) is not clear
        assert "On a CPU Liger saves memory, not time" in text


def test_memory_of_the_baseline_loss_is_three_times_the_logits(tiny_demo: Finished) -> None:
    logits = 2 * 64 * 32000 * 4
    # Beside the logits and what the loss makes of them there are the gradients of head and hidden states.
    gradients = (32000 + 2 * 64) * 256 * 4
    result = tiny_demo.result
    assert 3 * logits <= result["peak_loss_memory_hf_bytes"] <= 3 * logits + gradients + logits // 2
    # Parameters, gradients and the state of the optimizer.
    assert result["peak_memory_liger_bytes"] >= 4 * 4 * result["parameters"]


@pytest.mark.parametrize("name", ["loss.png", "memory.png"])
def test_picture_shows_something(tiny_demo: Finished, name: str) -> None:
    pixels = matplotlib.image.imread(tiny_demo.folder / name)
    assert min(pixels.shape[:2]) > 300
    assert pixels[..., :3].std() > 0.05


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--model", "7b", f"demo: --model must be one of {', '.join(PRESETS)}, got '7b'"),
        ("--device", "tpu", "demo: --device must be auto, cpu or cuda, got 'tpu'"),
        ("--dtype", "int8", "demo: --dtype must be one of float32, bfloat16, float16, got 'int8'"),
    ],
)  # fmt: skip
def test_wrong_usage_ends_with_2(liger: InProcess, tmp_path: Path, option: str, value: str, sentence: str) -> None:
    assert_refused(liger, sentence, "demo", "--out", str(tmp_path), option, value)


@pytest.mark.parametrize(("hf", "liger"), [(9.0, 9.002), (math.nan, math.nan)])
def test_a_difference_above_the_bound_and_a_loss_that_is_not_a_number_fail(hf: float, liger: float) -> None:
    assert not compare_losses({"hf": [10.0, hf], "liger": [10.0, liger]})["passed"]


def test_a_low_precision_is_judged_by_the_noise_of_reordered_sums() -> None:
    found = compare_losses({"hf": [10.0, 9.0], "liger": [10.0, 9.02], "reordered": [10.0, 9.01]})
    assert found["loss_difference_bound"] == pytest.approx(3 * 0.01)
    assert found["passed"]


def test_the_run_with_reordered_sums_writes_attention_out() -> None:
    model = build(Setup("tiny", device="cpu", precision="fp32", checkpoint="none"), torch.device("cpu")).model
    EagerAttention().on_train_begin(model=model)
    assert model.config._attn_implementation == "eager"


def test_a_run_that_fails_is_a_reason(liger: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = row_of(Setup("tiny"), WHERE, {"reason": "the device failed", "failed": True})
    monkeypatch.setattr("liger_train.demo.run.run", lambda setup, **_: failed)
    code, errors = liger("demo", "--out", str(tmp_path), "--model", "tiny", "--device", "cpu")
    assert (code, errors.endswith("the device failed")) == (1, True)
    assert list(tmp_path.iterdir()) == []
