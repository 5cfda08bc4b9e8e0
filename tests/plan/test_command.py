# SPDX-License-Identifier: Apache-2.0
"""`liger plan` as it is called."""

import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from http.server import HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from liger_bench.printing import size
from liger_train.plan import planning
from liger_train.plan.comparison import rows_in
from liger_train.plan.step import Prediction, predict
from liger_train.row import row_of
from liger_train.setup import Setup

pytestmark = pytest.mark.slow

Plan = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan-accuracy.md"
TINY = ("--model", "tiny", "--batch", "2", "--sequence", "64")


@pytest.fixture
def plan(liger_output: Plan) -> Plan:
    """Run `liger plan` in this process: exit code, output, and errors as one line."""
    return partial(liger_output, "plan")


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


def test_a_plan_of_several_machines_has_the_bytes_and_the_seconds_of_a_step(plan: Plan) -> None:
    setup = (*TINY, "--shard", "fsdp2", "--ranks", "16", "--nodes", "2", "--no-techniques")
    code, output, _ = plan(*setup, "--network", "25")
    assert code == 0
    words = " ".join(output.replace("│", " ").split())
    assert "all-gather of weights, 16 ranks" in words
    assert "(8 GPUs per machine, 450 GB/s within it, 25 GB/s between machines)" in words
    assert "Host memory per machine: 0 bytes for offloaded state" in words
    found = json.loads(plan(*setup, "--json")[1])
    traffic = found["traffic"]
    assert traffic["checkpoint_bytes"] == 8 * found["prediction"]["static_bytes"]
    assert f"and up to {size(traffic['checkpoint_bytes'])} for a checkpoint of --output while it is written" in words
    assert [row["kind"] for row in traffic["exchanges"]] == ["all-gather", "reduce-scatter"]
    assert sum(row["seconds"] for row in traffic["exchanges"]) == traffic["estimate"]["sharding"]
    code, _, said = plan(*TINY, "--ranks", "16", "--nodes", "3")
    assert (code, "plan: --nodes must divide the number of ranks, got 3 and 16 ranks" in said) == (2, True)


def test_the_sequence_auto_is_the_longest_that_fits(plan: Plan) -> None:
    limits = ("--memory-limit", "160MiB", "--no-techniques", "--json")
    code, output, _ = plan("--model", "tiny", "--sequence", "auto", *limits)
    found = json.loads(output)
    longest, setup = found["longest_sequence"], found["prediction"]["setup"]
    assert code == 0
    assert (setup["sequence"], found["largest_batch"], found["fewest_ranks"]) == (longest, None, None)
    following = predict(Setup("tiny", 1, longest + 64)).peak_bytes
    assert found["prediction"]["peak_bytes"] <= 160 << 20 < following
    by_batch = {row["batch"]: row["sequence"] for row in found["what_fits"]}
    assert list(by_batch) == [1, 2, 4]
    assert by_batch[1] == pytest.approx(longest, abs=64)
    assert 64 < by_batch[4] < by_batch[2] < by_batch[1]


@pytest.mark.parametrize(
    ("limit", "exit_code", "sentences"),
    [
        ("40MB", 0, ["The largest batch that fits, by sequence and number of GPUs:", " 24 GPUs ", "6 is the smallest number of GPUs on which this setup fits in 38.15 MiB.", "2,048 tokens is the longest sequence of this setup that the model supports, and fits in 38.15 MiB.", "1 × 2048 tokens is the largest batch"]),
        ("20900kB", 1, ["No number of GPUs is enough for 19.93 MiB each. 1 × 1024 tokens need 20.07 MiB on each of 4,096.", "No sequence of this setup fits in 19.93 MiB. 1 × 64 tokens need 114.50 MiB.", "No batch of this setup fits in 19.93 MiB. 1 × 1024 tokens need 115.42 MiB."]),
    ],
    ids=["everything fits", "nothing fits"],
)  # fmt: skip
def test_every_search_ends_with_a_sentence(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, limit: str, exit_code: int, sentences: list[str]
) -> None:
    def peak(setup: Setup) -> float:
        return 100e6 / setup.ranks + 20e6 + 1e3 * setup.batch * setup.sequence

    def prediction(setup: Setup) -> Prediction:
        return Prediction(setup, int(peak(setup)), {"weights": 1}, "forward pass", 0, 1, 1)

    monkeypatch.setattr(planning, "predict", prediction)
    monkeypatch.setattr(planning, "fast_peak", lambda setup: peak)
    monkeypatch.setattr(planning, "checklist", lambda *arguments: [])
    autos = [word for name in ("batch", "sequence", "ranks") for word in (f"--{name}", "auto")]
    code, output, _ = plan("--model", "tiny", "--shard", "fsdp2", *autos, "--memory-limit", limit, "--no-techniques")
    assert (code, [sentence for sentence in sentences if sentence not in output]) == (exit_code, [])


def test_what_does_not_fit_is_an_exit_code_and_a_way_out(plan: Plan) -> None:
    code, output, _ = plan(
        "--model", "tiny", "--batch", "8", "--sequence", "256", "--liger", "none", "--memory-limit", "768MiB",
        "--no-techniques",
    )  # fmt: skip
    assert code == 1
    assert "does not fit" in output
    assert "liger train --model tiny --batch 8 --sequence 256" in output
    # A measured speed, and what a technique costs beside it.
    assert re.search(r"│ Liger +│ 1\.\d\d × .*│ nothing", output)


def test_a_page_is_served_until_the_command_is_interrupted(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(served: HTTPServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HTTPServer, "serve_forever", interrupted)
    code, output, _ = plan("--model", "tiny", "--serve")
    assert code == 0
    assert re.search(r"http://127.0.0.1:\d+ shows the page", output)


def test_a_sweep_is_planned_run_by_run(plan: Plan, tmp_path: Path) -> None:
    arguments = ("--model", "tiny", "--sequence", "64", "--sweep", "batch=1,2", "--strategies", "none,all")
    code, output, _ = plan(*arguments, "--memory-limit", "160MiB", "--out", str(tmp_path), "--json")
    predictions = json.loads(output)["predictions"]
    runs = [(row["setup"]["batch"], row["setup"]["liger"]) for row in predictions]
    assert code == 0
    assert runs == [(1, "none"), (1, "all"), (2, "none"), (2, "all")]
    predicted = [predict(Setup("tiny", batch, 64, liger=liger)).peak_bytes for batch, liger in runs]
    assert [row["peak_bytes"] for row in predictions] == predicted
    assert json.loads((tmp_path / "plan.json").read_text())["predictions"] == predictions
    code, output, _ = plan(*arguments, "--memory-limit", "20MiB")
    assert code == 1
    assert re.search(r"2 +all +[0-9.]+ +\w+ \w+ +no", output.replace("│", " "))


def test_every_run_of_a_sweep_gets_the_value_that_fits(plan: Plan) -> None:
    arguments = ("--model", "tiny", "--sweep", "sequence=64,128", "--strategies", "all", "--memory-limit", "160MiB")
    _, output, _ = plan(*arguments, "--batch", "auto", "--json")
    rows = json.loads(output)["predictions"]
    assert [row["setup"]["batch"] for row in rows] == [15, 7]
    assert all(row["peak_bytes"] <= 160 << 20 for row in rows)


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
        (("--model", "tiny", "--device", "cpu", "--batch", "auto"), "plan: --batch auto needs a limit, and --device cpu has none; give, for instance, --memory-limit 24GiB"),
        (("--model", "tiny", "--device", "cpu", "--sequence", "auto", "--ranks", "auto"), "plan: --sequence auto needs a limit, and --device cpu has none; give, for instance, --memory-limit 24GiB"),
        (("--model", "tiny", "--sequence", "long"), "plan: --sequence must be a number or auto, got 'long'"),
        (("--compare", "nothing.json"), ("plan: --compare must name results of `liger train`, but no row of nothing.json can be predicted")),
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
    sentence = "1 peak, with a largest error of 5.0% (10% is allowed). Whether it fits: correct for 2 of 2 setups."
    assert sentence in " ".join(output.split())
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
    # Measured before runs had one set of gradient buckets; see docs/planning.md.
    known = ["| torchrun --nproc-per-node 2 -m liger_core train --model llama-3.2-1b --batch 8 --steps 6"]
    assert [line[0] for line in cells if "wrong" in line[-1]] == known
