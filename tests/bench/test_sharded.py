# SPDX-License-Identifier: Apache-2.0
"""`liger bench sharded`: rows for each number of ranks, beside the peers, that resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from liger_bench.sharded.command import sharded
from liger_bench.sharded.job import HeadJob, combine_ranks
from liger_core.errors import OptionError

SMALL: dict[str, Any] = {"rows": 12, "width": 8, "classes": [37], "ops": ["linear_cross_entropy"]}
SMALL |= {"repetitions": 2, "device": "cpu"}


@pytest.mark.slow
def test_every_implementation_gives_the_same_loss_and_a_second_run_measures_nothing_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sharded(**SMALL, ranks="1,2", as_json=True, out=tmp_path)
    rows = json.loads(capsys.readouterr().out)["rows"]
    wanted = [(1, "liger"), (2, "liger"), (2, "gathered"), (2, "loss-parallel")]
    assert [(row["ranks"], row["implementation"]) for row in rows] == wanted
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * 4, rel=1e-5)
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
    assert rows[1]["efficiency"] == pytest.approx(rows[0]["seconds"] / (2 * rows[1]["seconds"]))
    sharded(**SMALL, ranks="1,2", as_json=True, out=tmp_path, resume=True)
    assert json.loads(capsys.readouterr().out)["rows"] == rows


def test_time_is_that_of_the_slowest_rank_and_memory_of_the_one_that_holds_the_most() -> None:
    job = HeadJob("linear_cross_entropy", 1, 1, 1, "liger", 2, "cpu", "float32")
    times = ([1.0, 3.0, 2.0], [2.0, 1.0, 4.0])
    ranks = [{"seconds": seconds, "peak_bytes": 5 + rank, "loss": 7.0} for rank, seconds in enumerate(times)]
    found = combine_ranks(job, ranks, alone=6.0)
    assert (found["seconds"], found["efficiency"], found["peak_bytes"]) == (3.0, 1.0, 6)


@pytest.mark.parametrize("ranks", ["0", "two", "1,,2"])
def test_ranks_must_be_numbers(ranks: str) -> None:
    with pytest.raises(OptionError, match="bench sharded: --ranks must be numbers like 1,2,4"):
        sharded(**SMALL, ranks=ranks)
