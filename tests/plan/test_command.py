# SPDX-License-Identifier: Apache-2.0
"""`liger plan` as it is called."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from liger_core.commands import main
from liger_train.plan.comparison import rows_in
from liger_train.plan.step import predict
from liger_train.row import row_of
from liger_train.setup import Setup

Plan = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan-accuracy.md"
TINY = ("--model", "tiny", "--batch", "2", "--sequence", "64")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Run `liger plan` in this process: exit code, output, and errors as one line."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["liger", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, " ".join(written.err.replace("│", " ").split())

    return run


def test_a_plan_as_json_holds_everything(plan: Plan, tmp_path: Path) -> None:
    code, output, said = plan(*TINY, "--memory-limit", "160MiB", "--out", str(tmp_path), "--json")
    found: dict[str, Any] = json.loads(output)
    assert code == 0
    assert "predicting " in said
    assert found["fits"] is True
    assert found["prediction"]["peak_bytes"] == predict(Setup("tiny", 2, 64)).peak_bytes
    assert found["largest_batch"] > 2
    assert found["command"] == found["prediction"]["command"]
    assert found["checklist"] == []
    assert found["command"].startswith("liger train --model tiny")
    assert shlex.split(found["command"])[-2:] == ["--memory-limit", "160MiB"]
    assert {"lora", "adamw-8bit", "none"} <= {row["value"] for row in found["techniques"]}
    assert json.loads((tmp_path / "plan.json").read_text()) == found
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_batch_auto_is_the_largest_that_fits(plan: Plan) -> None:
    arguments = ("--model", "tiny", "--sequence", "64", "--memory-limit", "160MiB", "--no-techniques", "--json")
    code, output, _ = plan(*arguments, "--batch", "auto")
    found = json.loads(output)
    assert code == 0
    assert (
        found["prediction"]["setup"]["batch"]
        == found["largest_batch"]
        == json.loads(plan(*arguments)[1])["largest_batch"]
        > 1
    )


def test_the_batch_auto_is_one_sequence_where_none_fits(plan: Plan) -> None:
    code, output, _ = plan("--model", "tiny", "--batch", "auto", "--memory-limit", "20MiB", "--no-techniques")
    assert code == 1
    assert "No batch of this setup fits in 20 MiB." in output
    assert "1 × 1024 tokens do not fit" in output


def test_what_does_not_fit_is_an_exit_code_and_a_way_out(plan: Plan) -> None:
    code, output, _ = plan(
        "--model",
        "tiny",
        "--batch",
        "8",
        "--sequence",
        "256",
        "--liger",
        "none",
        "--memory-limit",
        "768MiB",
        "--no-techniques",
    )
    assert code == 1
    assert "does not fit" in output
    assert "liger train --model tiny --batch 8 --sequence 256" in output


def test_a_sweep_is_planned_run_by_run(plan: Plan, tmp_path: Path) -> None:
    arguments = ("--model", "tiny", "--sequence", "64", "--sweep", "batch=1,2", "--strategies", "none,all")
    code, output, _ = plan(*arguments, "--memory-limit", "160MiB", "--out", str(tmp_path), "--json")
    predictions = json.loads(output)["predictions"]
    runs = [(row["setup"]["batch"], row["setup"]["liger"]) for row in predictions]
    assert code == 0
    assert runs == [(1, "none"), (1, "all"), (2, "none"), (2, "all")]
    assert [row["peak_bytes"] for row in predictions] == [
        predict(Setup("tiny", batch, 64, liger=liger)).peak_bytes for batch, liger in runs
    ]
    assert json.loads((tmp_path / "plan.json").read_text())["predictions"] == predictions
    code, output, _ = plan(*arguments, "--memory-limit", "20MiB")
    assert code == 1
    assert re.search(r"2 +all +[0-9.]+ +\w+ \w+ +no", output.replace("│", " "))


def test_the_command_for_the_cpu_is_one_that_can_be_run(plan: Plan) -> None:
    _, output, _ = plan(*TINY, "--device", "cpu", "--memory-limit", "1GiB", "--no-techniques", "--json")
    found = json.loads(output)
    assert found["memory_limit"] == 1 << 30
    assert found["command"] == "liger train --model tiny --batch 2 --sequence 64 --device cpu"


def test_without_a_limit_no_verdict_is_given(plan: Plan) -> None:
    code, output, _ = plan(*TINY, "--no-techniques", "--device", "cpu", "--precision", "fp32")
    assert code == 0
    assert "--memory-limit 24GiB" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "plan: give either --model or --compare"),
        (("--model", "tiny", "--device", "tpu"), "plan: --device must be auto, cpu or cuda, got 'tpu'"),
        (("--model", "tiny", "--optimizer", "adamww"), "Did you mean 'adamw'?"),
        (("--model", "tiny", "--batch", "many"), "plan: --batch must be a number or auto, got 'many'"),
        (("--model", "tiny", "--batch", "0"), "plan: --batch must be from 1 to"),
        (("--model", "tiny", "--device", "cpu", "--batch", "auto"), "plan: --batch auto needs a limit to stay within, and --device cpu has none; give, for instance, --memory-limit 24GiB"),
        (("--model", "tiny", "--memory-limit", "much"), "must be a size like 24GiB"),
        (("--model", "tiny", "--memory-limit", "24"), "must be a size like 24GiB or 512MB, got '24', which needs a unit: 24GiB?"),
        (("--compare", "nothing.json"), ("plan: --compare must name results of `liger train`, but nothing.json has no rows that can be predicted")),
        (("--model", "tiny", "--offload", "parameters"), "plan: --offload parameters needs --shard zero3 or fsdp2"),
    ],
)  # fmt: skip
def test_the_error_of_an_invalid_call_has_a_remedy(plan: Plan, arguments: tuple[str, ...], words: str) -> None:
    code, _, errors = plan(*arguments)
    assert code != 0
    assert words in errors


def _results(folder: Path, *rows: tuple[Setup, dict[str, Any]]) -> None:
    where = {"machine": "m", "versions": "v", "commit": "c", "date": "d"}
    (folder / "train.json").write_text(json.dumps([row_of(setup, where, results).columns() for setup, results in rows]))


def test_a_comparison_shows_the_error_and_whether_it_was_right(plan: Plan, tmp_path: Path) -> None:
    small = Setup("tiny", 2, 64, memory_limit=1 << 30)
    large = Setup("tiny", 64, 1024, liger="none", memory_limit=1 << 30)
    measured = int(predict(small).peak_bytes / 1.05)
    _results(tmp_path, (small, {"peak_bytes": measured}), (large, {"out_of_memory": True}), (large, {"failed": True}))
    code, output, _ = plan("--compare", str(tmp_path), "--out", str(tmp_path))
    page = (tmp_path / "plan-accuracy.md").read_text()
    assert code == 0
    assert (
        "1 peak, with a largest error of 5.0% (10% is allowed). Whether it fits: correct for 2 of 2 setups."
        in " ".join(output.split())
    )
    assert "| +5.0% |" in page
    assert "out of memory" in page


@pytest.mark.parametrize(
    "results", [{"peak_bytes": 1 << 40}, {"out_of_memory": True}], ids=["far off", "wrong about fitting"]
)
def test_a_comparison_fails_if_a_prediction_does(plan: Plan, tmp_path: Path, results: dict[str, Any]) -> None:
    _results(tmp_path, (Setup("tiny", 2, 64, memory_limit=1 << 40), results))
    assert plan("--compare", str(tmp_path))[0] == 1


def test_the_committed_comparison_is_of_all_committed_rows() -> None:
    """Predicting them again takes two minutes: liger plan --compare …, as the page says."""
    text = PAGE.read_text()
    command = re.search(r"<!-- Generated by `(.+)`; do not edit. -->", text)
    words = shlex.split(command[1])
    rows = [row for name, path in pairwise(words) if name == "--compare" for row in rows_in(ROOT / path)]
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith(("| --model", "| torchrun"))]
    assert len(cells) == len(rows) >= 12
    measured = ["out of memory" if row["out_of_memory"] else f"{row['peak_bytes'] / 2**30:.2f}" for row in rows]
    assert [line[2] for line in cells] == measured
    # See the limitations in docs/planning.md.
    known = ["| torchrun --nproc-per-node 2 -m liger_core train --model llama-3.2-1b --batch 8 --liger none --steps 6"]
    assert [line[0] for line in cells if "wrong" in line[-1]] == known
