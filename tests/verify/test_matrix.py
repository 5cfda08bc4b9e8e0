# SPDX-License-Identifier: Apache-2.0
"""`liger verify` over several models and setups: one truth for all that share it, and none is lost because of another."""

import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

from liger_core.errors import OptionError
from liger_verify import matrix
from liger_verify.command import verify
from liger_verify.matrix import Outcome, outcomes, setups_in, steps_of
from liger_verify.training import Training
from liger_verify.world import World


@dataclass(frozen=True)
class Fake(Training):
    """A step without a model: the truth says how often it was computed, and `shard` what the ranks do."""

    def check(self) -> None:
        pass

    def __call__(self, world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
        if world.alone:
            if self.model == "no_truth":
                raise ValueError("there is no such model")
            with Path(self.options["log"]).open("a") as log:
                log.write(f"{self.model} {self.ranks}\n")
        elif self.shard == "raises" and world.rank == 1:
            raise ValueError("rank 1 has no data")
        elif self.shard == "crashes" and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.shard == "leaves" and world.rank == 1:
            os._exit(7)
        elif self.shard == "hangs" and world.rank == 1:
            time.sleep(1000)
        if not world.alone:
            torch.distributed.barrier()
        factor = world.ranks if self.shard == "summed" else 1
        return torch.ones(()), {"a.b.weight": torch.ones(3) * factor}


def run(steps: Sequence[Training], limit: float = 120.0) -> list[Outcome]:
    return list(outcomes(steps, tolerance=1e-4, patience=120.0, limit=limit))


def fakes(log: Path, *shards: str, **fields: Any) -> list[Training]:
    return [Fake(shard=shard, options={"log": str(log)}, **fields) for shard in shards]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


@pytest.mark.slow
def test_a_comparison_that_hangs_is_ended_and_ends_no_other(log: Path) -> None:
    run(fakes(log, "fine"))
    # On a busy machine a comparison takes longer; the first one has imported the libraries.
    start = time.monotonic()
    run(fakes(log, "fine"))
    limit = math.ceil(5 * (time.monotonic() - start))
    hanging, after = run(fakes(log, "hangs", "fine"), limit)
    assert str(hanging) == f"failed: TimeoutError: it was ended after {limit} s, the limit"
    assert after.right


@pytest.mark.slow
def test_what_one_process_computes_is_computed_once_for_each_model_and_data(log: Path) -> None:
    no_truth = fakes(log, "fine", "summed", model="no_truth")
    more = fakes(log, "fine", accumulation=2)
    found = run([*no_truth, *fakes(log, "fine", "raises", "fine"), *more, *fakes(log, "fine", model="other")])
    assert [outcome.result for outcome in found] == ["failed", "failed", "right", "failed", "right", "right", "right"]
    assert str(found[1]) == "failed: one process in float64: rank 0: ValueError: there is no such model"
    # Micro-batches on two data-parallel ranks.
    assert log.read_text().split("\n")[:-1] == ["llama 2", "llama 4", "other 2"]


def test_setups_that_share_a_truth_have_the_same_data() -> None:
    model = SimpleNamespace(
        device=torch.device("cpu"), config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=50))
    )
    for training in steps_of(["llama"], matrix.SETUPS, [True]):
        ours, theirs = training.data(model), training.truth.data(model)
        pairs = zip(ours, theirs, strict=True)
        assert all(torch.equal(a.labels, b.labels) and torch.equal(a.ids, b.ids) for a, b in pairs)


def test_a_matrix_is_every_model_in_every_setup_with_and_without_liger() -> None:
    found = steps_of(
        ["llama", "qwen3"], [{"tp": 2}, {"tp": 2, "cp": 2}, {"model": "phi3", "liger": False}], [False, True], seed=3
    )
    assert [(t.model, t.tp, t.cp, t.ranks, t.liger) for t in found] == [
        *[("llama", 2, cp, 2 * cp, liger) for cp in (1, 2) for liger in (False, True)],
        ("phi3", 1, 1, 2, False),
        *[("qwen3", 2, cp, 2 * cp, liger) for cp in (1, 2) for liger in (False, True)],
    ]
    assert {t.seed for t in found} == {3}


@pytest.mark.slow
def test_several_models_are_compared_in_one_table(capfd: pytest.CaptureFixture[str]) -> None:
    verify(model=["llama", "qwen3"], tp=2, liger=False, as_json=True)
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["right"]
    assert [(each["model"], each["result"], each["liger"]) for each in found["comparisons"]] == [
        ("llama", "right", False),
        ("qwen3", "right", False),
    ]
    assert found["largest_error"] == max(each["largest_error"] for each in found["comparisons"]) > 0
    assert "2 of 2: qwen3" in err


@pytest.mark.slow
def test_a_comparison_that_fails_says_why_ends_no_other_and_makes_the_exit_code_1(
    log: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = fakes(log, "fine", "raises", "crashes", "leaves", "summed")
    monkeypatch.setattr("liger_verify.command.steps_of", lambda *_, **__: steps)
    with pytest.raises(typer.Exit) as ended:
        verify(matrix=True)
    assert ended.value.exit_code == 1
    *_, raised, crashed, left, wrong, counts = capfd.readouterr().out.strip().split("\n")
    setup = "llama with Liger on 2 ranks: tp 1, cp 1, dp 2, {}, 1 micro-batches:"
    assert raised == f"{setup.format('raises')} failed: rank 1: ValueError: rank 1 has no data"
    assert crashed.endswith(" failed: rank 1 ended with SIGKILL")
    assert left.endswith(" failed: rank 1 ended with exit code 7")
    assert wrong.startswith(f"{setup.format('summed')} wrong: going back from the loss")
    assert "it is 2 times the right one, which is dp or dp × cp (2)" in wrong
    assert counts.startswith("1 of 5 comparisons are right, largest relative error 1.0e+00")


def test_setups_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "setups.toml"
    path.write_text('[[setup]]\ntp = 2\nranks = 4\n\n[[setup]]\nmodel = "qwen3"\nshard = "ddp"\nliger = true\n')
    assert setups_in(str(path)) == [{"tp": 2, "ranks": 4}, {"model": "qwen3", "shard": "ddp", "liger": True}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[setup]]\nrank = 2", "got 'rank'. Did you mean 'ranks'?"),
        ("[[setup]]\ntp = true", "tp must be of type int, got True"),
        ("[[setup]]\nranks = 1", "ranks must be at least 2, got 1"),
        ("[[setups]]\ntp = 2", "--setups must be a file of tables [[setup]] and nothing else"),
        ("setup = []", "--setups must be a file of tables [[setup]] and nothing else"),
        ("tp =", "--setups must be a TOML file"),
    ],
    ids=["name", "type", "least", "other_table", "none", "no_toml"],
)
def test_a_wrong_file_of_setups_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "setups.toml"
    path.write_text(text)
    with pytest.raises(OptionError) as raised:
        setups_in(str(path))
    assert message in str(raised.value)


UNKNOWN = "verify: model must be a model type of Transformers or a folder, got 'lama'. Did you mean 'llama'?"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one_setup": ({"matrix": True, "tp": 2}, "verify: --matrix has several setups; leave out --tp, which is of one"),
    "step": ({"setups": "a.toml", "step": "a.py:b"}, "verify: --setups has several setups; leave out --step, which is of one"),
    "both": ({"setups": "a.toml", "matrix": True}, "verify: --matrix has its setups, --setups those of a file; leave one of them out"),
    "tolerance": ({"matrix": True, "tolerance": 0.0}, "compare: tolerance must be > 0, got 0.0"),
    "heads": ({"tp": 3}, "verify: tp must divide the 8 key heads of llama, since a head is never split, got 3"),
    "ranks": ({"tp": 2, "ranks": 3}, "verify: ranks must be a multiple of tp × cp = 2 × 1, got 3"),
    "shard": ({"shard": "zero"}, "verify: shard must be one of none, ddp, fsdp2, got 'zero'"),
    "ddp": ({"shard": "ddp", "tp": 2, "ranks": 4}, "verify: shard must be 'fsdp2' where Transformers shards layers (tp) over a part of the ranks, got 'ddp'"),
    "sequence": ({"cp": 2, "sequence": 9}, "verify: sequence must be a multiple of cp = 2, got 9"),
    "model": ({"model": ["lama"]}, UNKNOWN),
    "one_of_two_models": ({"model": ["llama", "lama"]}, UNKNOWN),
    "step_and_model": ({"step": "a.py:b", "model": ["llama"]}, "verify: --step is a step of your own; leave out --model, which is for models"),
    "step_and_plain": ({"step": "a.py:b", "liger": False}, "verify: --step is a step of your own; leave out --plain, which is for models"),
    "packing_and_tp": ({"packing": True, "tp": 2}, "verify: --packing compares documents on one process; leave out --tp"),
    "packing_and_device": ({"packing": True, "device": "cuda"}, "verify: --packing compares documents on one process; leave out --device"),
    "packing_and_matrix": ({"packing": True, "matrix": True}, "verify: --packing compares documents on one process; leave out --matrix"),
    "packing_and_setups": ({"packing": True, "setups": "a.toml"}, "verify: --packing compares documents on one process; leave out --setups"),
    "sampler_and_models": ({"sampler": True, "model": ["llama", "gemma3_text"]}, "verify: --sampler compares one model, got llama, gemma3_text; run it for each"),
    "sampler_and_packing": ({"sampler": True, "packing": True}, "verify: --sampler compares one model on one process; leave out --packing"),
    "log_probs_and_tp": ({"log_probs": "nowhere", "tp": 2}, "verify: --sampler compares one model on one process; leave out --tp"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        verify(**options)
    assert str(raised.value) == message
