# SPDX-License-Identifier: Apache-2.0
"""One tiny demo and one quick benchmark, shared by many tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

import forks
from bench.commands import START, TWICE, Finished, run_liger


@pytest.fixture(scope="session", autouse=True)
def processes_are_forks() -> Iterator[None]:
    """Those of sweeps and benchmarks, in which a new interpreter would spend most of its time importing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("liger_bench.process.multiprocessing", forks)
        yield


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A demo of six short steps on the CPU: enough for the loss to fall whatever the text."""
    folder = tmp_path_factory.mktemp("demo")
    command = (
        "demo",
        "--steps",
        "6",
        "--batch",
        "2",
        "--sequence",
        "64",
        "--device",
        "cpu",
        "--out",
        str(folder),
        "--json",
    )
    # Includes what libraries print while they are imported.
    done = subprocess.run([sys.executable, "-c", START, *command], capture_output=True, text=True, timeout=300)
    return Finished(done.returncode, done.stdout, done.stderr, folder)


@pytest.fixture(scope="session")
def quick_bench(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The quick workloads of one op on the CPU, twice into the same files."""
    folder = tmp_path_factory.mktemp("bench")
    command = ("bench", "swiglu", "--quick", "--seconds", "0.02", "--device", "cpu", "--json", "--out", str(folder))
    command += ("--csv", str(folder / "rows.csv"))
    done = run_liger(*command, start=TWICE)
    return Finished(done.returncode, done.stdout.partition("BETWEEN")[2], done.stderr, folder)
