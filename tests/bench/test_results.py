# SPDX-License-Identifier: Apache-2.0
"""Files of rows: what a full disk, a killed run and several runs at once leave of them."""

import csv
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from filelock import FileLock

import forks
from liger_bench import results
from liger_bench.measurements import Files, completed
from liger_bench.results import LOCK, append_csv, append_json, check_csv, read_json
from liger_bench.row import Measurement, ResultRow, row_from
from liger_bench.sharded import job as sharded
from liger_core.errors import OptionError
from liger_train import row as train

HEADER = ["name", "losses", "note"]
ROWS = [{"name": f"row {index}", "losses": [1.5, 1.25], "note": "4 × 1024,\nkept"} for index in range(3)]
LINES = [{"name": f"row {index}", "losses": "1.5 1.25", "note": "4 × 1024,\nkept"} for index in range(3)]


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    append_csv(ROWS[:2], path, HEADER)
    return path


def test_rows_are_appended_under_one_header(table: Path) -> None:
    append_csv(ROWS[2:], table, HEADER)
    assert lines(table) == LINES


def test_rows_are_appended_in_the_order_of_the_columns_in_the_file(table: Path) -> None:
    moved = [HEADER[2], *HEADER[:2]]
    check_csv(table, moved)
    append_csv(ROWS[2:], table, moved)
    assert lines(table) == LINES


@pytest.mark.parametrize("kind", [sharded.HeadRow, train.Row], ids=lambda kind: kind.__module__)
def test_a_row_ends_with_where_and_when_it_was_measured(kind: type[ResultRow]) -> None:
    assert kind.header()[-4:] == ["machine", "versions", "commit", "date"]
    assert sorted(kind.header()) == sorted(field.name for field in fields(kind))


WHERE = dict.fromkeys(("machine", "versions", "commit", "date"), "here")


def jobs(*implementations: str) -> list[sharded.HeadJob]:
    return [sharded.HeadJob("op", 8, 4, 50, name, 2, "cpu", "float32") for name in implementations]


def test_a_row_without_figures_says_why_and_what_was_asked_for() -> None:
    (job,) = jobs("liger")
    row = row_from(sharded.HeadRow, job, WHERE, {"reason": "no GPU"})
    assert (row.op, row.implementation, row.reason, row.failed, row.date) == ("op", "liger", "no GPU", False, "here")
    assert row.seconds is None
    assert list(row.columns()) == sharded.COLUMNS


@pytest.mark.parametrize("other", ["machine", "versions", "commit", "dtype", "implementation", None])
def test_only_a_row_of_the_same_job_and_place_is_not_measured_again(other: str | None) -> None:
    wanted = jobs("gathered", "liger")
    before = [row_from(sharded.HeadRow, wanted[1], WHERE, {"loss": 1.0})]
    before = [replace(row, **{other: "another"}) for row in before] if other else before
    asked: list[sharded.HeadJob] = []

    def measure(todo: list[sharded.HeadJob], kept: object, show: object) -> Iterator[Measurement[sharded.HeadRow]]:
        asked.extend(todo)
        yield from (Measurement(row_from(sharded.HeadRow, job, WHERE, {"loss": 2.0})) for job in todo[::-1])

    rows, found = completed(sharded.HeadJob, wanted, WHERE, before, Files("sharded", sharded.COLUMNS), measure)
    assert asked == (wanted if other else wanted[:1])
    assert [(row.implementation, row.loss) for row in rows] == [("gathered", 2.0), ("liger", 2.0 if other else 1.0)]
    assert len(found) == len(asked)


def test_a_line_that_lacks_only_its_end_stays(table: Path) -> None:
    table.write_bytes(table.read_bytes().removesuffix(b"\n"))
    append_csv(ROWS[2:], table, HEADER)
    assert lines(table) == LINES


@pytest.mark.parametrize(
    "end", [b"row 2,\r\n", b'row 2,"1.5 ', b"row 2,\xff,\r\n"], ids=["short", "in_quotes", "not_utf8"]
)
def test_a_table_without_whole_rows_is_an_error_and_stays(table: Path, end: bytes) -> None:
    before = table.read_bytes() + end
    table.write_bytes(before)
    with pytest.raises(OptionError, match=r"must be a table of whole rows in UTF-8, got .*; mend it or give another"):
        check_csv(table, HEADER)
    assert table.read_bytes() == before


def test_a_table_behind_a_link_is_appended_to(table: Path, tmp_path: Path) -> None:
    link = tmp_path / "links" / "rows.csv"
    link.parent.mkdir()
    link.symlink_to(table)
    append_csv(ROWS[2:], link, HEADER)
    # Nothing else is there, so the lock is that of the table.
    assert list(link.parent.iterdir()) == [link]
    assert link.is_symlink()
    assert lines(table) == LINES


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/fd")
def test_rows_are_written_to_a_pipe() -> None:
    reading, writing = os.pipe()
    append_csv(ROWS[:1], Path(f"/dev/fd/{writing}"), HEADER)
    os.close(writing)
    with os.fdopen(reading, newline="") as pipe:
        assert list(csv.DictReader(pipe)) == LINES[:1]


def test_a_table_on_a_full_disk_keeps_its_rows(table: Path, small_files: None) -> None:
    before = table.read_bytes()
    with pytest.raises(OptionError, match="got File too large; the rows that it had are unchanged; make room"):
        append_csv(ROWS * 10, table, HEADER)
    assert table.read_bytes() == before


def test_a_list_on_a_full_disk_keeps_its_rows(tmp_path: Path, small_files: None) -> None:
    path = tmp_path / "rows.json"
    append_json(ROWS[:1], path)
    with pytest.raises(OptionError, match="got File too large; the rows that it had are unchanged; make room"):
        append_json(ROWS * 10, path)
    assert read_json(path) == json.loads(json.dumps(ROWS[:1]))
    assert sorted(tmp_path.iterdir()) == [tmp_path / LOCK, path]


def test_a_new_table_on_a_full_disk_leaves_no_file(tmp_path: Path, small_files: None) -> None:
    with pytest.raises(OptionError, match="File too large"):
        append_csv(ROWS * 10, tmp_path / "rows.csv", HEADER)
    assert list(tmp_path.iterdir()) == [tmp_path / LOCK]


def test_a_device_without_room_raises_a_clear_error() -> None:
    with pytest.raises(OptionError, match="No space left on device"):
        append_csv(ROWS, Path("/dev/full"), HEADER)


def append_forty(folder: Path, name: str, connection: Connection) -> None:
    connection.send("ready")
    connection.recv()
    for index in range(40):
        rows = [{"name": f"{name} {index}", "note": "4 × 1024"}]
        append_csv(rows, folder / "rows.csv", ["name", "note"])
        append_json(rows, folder / "rows.json")


def test_two_processes_append_to_one_file_and_no_row_is_lost(tmp_path: Path) -> None:
    pipes = {name: forks.Context.Pipe() for name in ("one", "other")}
    both = [forks.Context().Process(append_forty, (tmp_path, name, theirs)) for name, (_, theirs) in pipes.items()]
    for process in both:
        process.start()
    assert [ours.recv() for ours, _ in pipes.values()] == ["ready"] * 2
    for ours, _ in pipes.values():
        ours.send("go")
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    wanted = {f"{name} {index}" for name in ("one", "other") for index in range(40)}
    assert {row["name"] for row in read_json(tmp_path / "rows.json")} == wanted
    assert {line["name"] for line in lines(tmp_path / "rows.csv")} == wanted
    assert len(lines(tmp_path / "rows.csv")) == 80


def test_a_file_that_another_process_keeps_locked_raises_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "PATIENCE", 0.05)
    with (
        FileLock(tmp_path / LOCK),
        pytest.raises(OptionError, match="must not be locked by another process for longer than 0 s; wait or"),
    ):
        append_json(ROWS, tmp_path / "rows.json")


def test_what_a_killed_run_left_is_overwritten(tmp_path: Path) -> None:
    for name in ("rows.json", "rows.csv"):
        (tmp_path / f"{name}.part").write_text("[")
    append_json(ROWS, tmp_path / "rows.json")
    append_csv(ROWS, tmp_path / "rows.csv", HEADER)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "rows.csv", "rows.json"]
    assert lines(tmp_path / "rows.csv") == LINES
