# SPDX-License-Identifier: Apache-2.0
"""Long commands say what they are doing: by a bar on a terminal, and by lines in a log."""

import contextlib
import re
import time

import pytest
from rich.progress import Progress

from liger_bench import progress
from liger_bench.progress import progress_bar


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", 0.01)
    monkeypatch.setattr(progress, "NEXT_LINE", 0.01)


def test_a_log_gets_a_line_while_work_is_in_progress(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as bar:
        task = bar.add_task("preparing", total=20, unit="step")
        time.sleep(0.3)
        assert re.fullmatch(r"step 0/20 · preparing · 0:00:00\n", capfd.readouterr().err)
        bar.update(task, completed=3, description="loss 1.5")
        time.sleep(0.3)
        assert re.fullmatch(r"step 3/20 · loss 1\.5 · 0:00:00\n", capfd.readouterr().err)


def test_a_log_ends_with_what_was_done_last(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", 60.0)
    with contextlib.suppress(ValueError), progress_bar() as bar:
        bar.advance(bar.add_task("predicting", total=4))
        raise ValueError("no such layer")
    assert capfd.readouterr().err == "1/4 · predicting · 0:00:00\n"


def test_what_has_not_changed_is_not_repeated(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as bar:
        bar.add_task("drawing", total=None)
        time.sleep(0.2)
    assert capfd.readouterr().err == "drawing · 0:00:00\n"


def test_a_command_that_has_nothing_to_do_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar():
        pass
    assert capfd.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    bar = progress_bar()
    assert type(bar) is Progress
    assert not bar.disable
