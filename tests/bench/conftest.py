# SPDX-License-Identifier: Apache-2.0
"""One quick benchmark, shared by many tests."""

from collections.abc import Iterator

import pytest

import forks
from bench.commands import TWICE, Finished


@pytest.fixture(scope="session", autouse=True)
def processes_are_forks() -> Iterator[None]:
    """Those of sweeps and benchmarks, in which a new interpreter would spend most of its time importing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("liger_bench.process.multiprocessing", forks)
        yield


@pytest.fixture(scope="session")
def quick_bench(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The quick workloads of one op on the CPU, twice into the same files."""
    folder = tmp_path_factory.mktemp("bench")
    command = ("bench", "swiglu", "--quick", "--seconds", "0.02", "--device", "cpu", "--json", "--out", str(folder))
    command += ("--csv", str(folder / "rows.csv"))
    done = forks.run(TWICE, *command)
    return Finished(done.returncode, done.stdout.partition("BETWEEN")[2], done.stderr, folder)
