# SPDX-License-Identifier: Apache-2.0
"""`liger bench step`: every case runs, beside a limit that follows from its arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from bench.test_report import cells, text_of
from liger_bench.bench.limits import Limits
from liger_bench.process import DONE, FAILED
from liger_bench.report.pictures import step_picture, styles
from liger_bench.row import row_from
from liger_bench.step import run, training
from liger_bench.step.arithmetic import arithmetic
from liger_bench.step.cases import CASES, HF, LIGER
from liger_bench.step.command import step
from liger_bench.step.job import Job, Row
from liger_bench.step.run import Timing, Turn
from liger_core.errors import DeviceError, OptionError

WHERE = {"machine": "m", "versions": "v", "commit": "c", "date": "d"}
RATE, BANDWIDTH = 1e9, 1e10


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, without measuring the machine, and without a compiler."""

    class InProcess:
        def __init__(self, turn: Turn, log: Path, patience: float, answer: Any) -> None:
            self.found = answer(turn, None)

        def wait(self) -> Any:
            return self.found

        def end(self) -> None: ...
        def kill(self) -> None: ...
        def written(self) -> str:
            return ""

    monkeypatch.setattr(run, "Process", InProcess)
    monkeypatch.setattr(training, "measure_limits", lambda *given: Limits(BANDWIDTH, RATE))
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: None)
    monkeypatch.setattr(training, "WARM_UP", 1)


def rows_of(capsys: pytest.CaptureFixture[str], **options: Any) -> list[dict[str, Any]]:
    step(tiny=True, device="cpu", steps=1, seconds=0.0, rounds=1, as_json=True, **options)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_implementations_of_a_case_have_the_same_loss_and_limit(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    if CASES[case].adapters:
        pytest.importorskip("peft")
    plain, *_, ours = rows_of(capsys, cases=[case], implementations=[HF, LIGER])
    assert (plain["replaced"], plain["reason"], ours["reason"]) == ("", "", "")
    assert "linear_cross_entropy 1" in ours["replaced"]
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert ours["limit_seconds"] == plain["limit_seconds"] > 0
    assert (ours["limit_seconds"] > ours["limit_without_recompute_seconds"]) == CASES[case].recompute
    assert ours["share"] == pytest.approx(ours["limit_seconds"] / ours["step_seconds"])
    assert ours["tokens_per_second"] == pytest.approx(2 * 32 / ours["step_seconds"])
    assert ours["peak_bytes"] > 0


def test_what_a_case_is_about_is_there() -> None:
    pytest.importorskip("peft")
    replaced = {
        name: training.Step(Job(name, LIGER, True, "cpu", "float32")).replaced
        for name in ("lora", "experts", "qk_norm")
    }
    assert "lora_linear 14" in replaced["lora"]
    assert "experts 2" in replaced["experts"]
    assert "qk_norm_rope 2" in replaced["qk_norm"]


def test_a_case_for_cuda_graphs_is_compiled_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: modes.append(mode))
    training.Step(Job("graphs", HF, True, "cpu", "float32"))
    assert modes == ["reduce-overhead"]


def test_an_update_moves_the_weights_and_the_others_do_not() -> None:
    for name, moved in (("update", True), ("long", False)):
        made = training.Step(Job(name, HF, True, "cpu", "float32"))
        before = [p.detach().clone() for p in made.model.parameters()]
        made()
        assert any(not torch.equal(p, q) for p, q in zip(made.model.parameters(), before, strict=True)) == moved


# By hand: 2 operations per weight and token in each of the passes; with adapters, the frozen weights have no gradient.
LLAMA_8B = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
HEAD = 4096 * 128256


@pytest.mark.parametrize(
    ("case", "forward_passes", "recomputed"),
    [("update", 3, LLAMA_8B), ("long", 3, LLAMA_8B)],
)
def test_the_arithmetic_is_that_of_the_formula(case: str, forward_passes: int, recomputed: int) -> None:
    made = CASES[case]
    batch, sequence = made.shape(False)
    tokens = batch * sequence
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made.config(False), dtype=torch.bfloat16)
    found = arithmetic(model, made, tokens, sequence)
    attention = 2 * tokens * sequence * 4096 * 32
    assert found.operations == pytest.approx(2 * tokens * forward_passes * (LLAMA_8B + HEAD) + 3.5 * attention)
    assert found.recomputed == pytest.approx(2 * tokens * recomputed + attention)
    parameters = sum(p.numel() for p in model.parameters())
    assert found.moved == (7 * 2 * parameters if made.optimizer else 0)


def test_a_token_passes_through_its_own_experts_alone() -> None:
    made = CASES["experts"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made.config(False), dtype=torch.bfloat16)
    one = 2048 * (32 + 4 + 4 + 32) * 128 + 2048 * 128 + 8 * 3 * 2048 * 768
    attention = 2 * 4096 * 128 * 32 * 6
    assert arithmetic(model, made, 1, 4096).operations == pytest.approx(
        2 * 3 * (6 * one + 2048 * 151936) + 3.5 * attention
    )


def test_a_second_run_measures_nothing_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rows_of(capsys, cases=["long"], implementations=[HF], out=tmp_path)
    monkeypatch.setattr(run, "Process", None)
    assert rows_of(capsys, cases=["long"], implementations=[HF], out=tmp_path, resume=True) == first


def test_implementations_alternate_and_one_that_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def answered(turn: Turn, patience: float, folder: Path) -> tuple[Any, str]:
        order.append(turn.job.implementation)
        figures = dict.fromkeys(run.LIMITS, 1.0) | {
            "taken": [2.0, 4.0],
            "peak_bytes": len(order),
            "loss": 0.5,
            "replaced": "",
        }
        return (
            (DONE, figures)
            if turn.job.implementation == HF
            else (FAILED, {"reason": "out of memory", "out_of_memory": True})
        ), "log"

    monkeypatch.setattr(run, "_answer", answered)
    jobs = [Job("long", name, True, "cpu", "float32") for name in (HF, LIGER)]
    plain, ours = (result.row for result in run.measured(jobs, WHERE, Timing(1, 0.0, 3, 1.0)))
    assert order == [HF, LIGER, HF, HF]
    assert (plain.step_seconds, plain.steps, plain.rounds, plain.peak_bytes, plain.share) == (
        3.0,
        6,
        3,
        4,
        pytest.approx(1 / 3),
    )
    assert (ours.out_of_memory, ours.failed, ours.reason, ours.tokens_per_second) == (
        True,
        False,
        "out of memory",
        None,
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cases": ["loras"], "tiny": True}, "--case must be one of lora, experts, .*Did you mean 'lora'"),
        ({"tiny": True, "resume": True}, "--resume needs --out"),
        ({}, "need a GPU, got --device cpu; give --tiny"),
    ],
    ids=["unknown case", "resume without a folder", "large models on the CPU"],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((OptionError, DeviceError), match=sentence):
        step(device="cpu", **options)


def measured_row(implementation: str, **figures: Any) -> Row:
    known = {
        "batch": 16,
        "sequence": 2048,
        "tokens_per_second": 8000.0,
        "step_seconds": 4.096,
        "low_seconds": 4.0,
        "high_seconds": 4.2,
    }
    known |= {
        "limit_seconds": 2.048,
        "limit_without_recompute_seconds": 1.5,
        "share": 0.5,
        "peak_bytes": 28 << 30,
        "loss": 12.5,
    }
    known |= {"product_flops_per_second": 7e14, "copy_bytes_per_second": 4.2e12}
    return row_from(Row, Job("lora", implementation, False, "cuda", "bfloat16"), WHERE, known | figures)


def test_the_report_has_a_table_and_a_picture(tmp_path: Path) -> None:
    rows = [measured_row(HF).columns(), measured_row(LIGER, tokens_per_second=12000.0, share=0.75).columns()]
    rows.append(
        replace(
            measured_row("liger-kernel"), tokens_per_second=None, share=None, out_of_memory=True, reason="out of memory"
        ).columns()
    )
    (tmp_path / "step.json").write_text(json.dumps(rows))
    text = text_of(tmp_path)
    assert "## Training steps" in text
    assert cells(text, "**Liger**")[2:7] == ["12,000", "7,802 – 8,192", "1.50", "–", "0.75"]
    assert "liger-kernel: out of memory" in text
    assert step_picture(rows, tmp_path / "steps.png", styles([HF, LIGER, "liger-kernel"]))
    assert not step_picture([], tmp_path / "none.png", {})
