# SPDX-License-Identifier: Apache-2.0
"""Plants each known bug in a copy of the sources and runs the tests that must see it: a green run is a failure."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from planted import MUTANTS, Mutant
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--tb=short", "--device", "cpu")
PACKAGES = ("liger_core", "liger_triton", "liger_hf", "liger_bench", "liger_train")
LIMIT = 240.0
# Each run is a fork of one process that has imported what takes longest; that process imports nothing of ours.
FORKS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Run:
    """What one run of the tests came to."""

    code: int
    output: str
    seconds: float


def main() -> int:
    """0 if the tests are green on the untouched sources and red for every bug."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only the mutants with one of these words in their names")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    FORKS.set_forkserver_preload(["torch", "pytest", "numpy"])
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    slices = sorted({(m.tests, m.interpreted) for m in chosen})
    with ThreadPoolExecutor(options.jobs) as pool:
        baselines = dict(zip(slices, pool.map(lambda part: run(None, *part), slices), strict=True))
        runs = list(pool.map(lambda m: run(m, m.tests, m.interpreted), chosen))
    table, failures = Table("planted bug", "file", "verdict", "seconds"), []
    for mutant, result in zip(chosen, runs, strict=True):
        complaint = judge(mutant, result, baselines[mutant.tests, mutant.interpreted])
        if complaint:
            failures.append((mutant, complaint, result))
        table.add_row(mutant.name, mutant.file, f"[red]{complaint}[/red]" if complaint else "seen", f"{result.seconds:.0f}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for mutant, complaint, result in failures:
        console.rule(f"{mutant.name}: {complaint}")
        console.print(result.output[-2000:], markup=False, highlight=False)
    console.print(f"{len(chosen) - len(failures)} of {len(chosen)} planted bugs were seen")
    return 1 if failures or not chosen else 0


def judge(mutant: Mutant, result: Run, baseline: Run) -> str:
    """Why this mutant does not count as seen, or nothing."""
    if baseline.code != 0:
        return "its tests fail without it"
    if result.code == 0:
        return "not seen"
    if mutant.seen not in result.output:
        return f"seen by something else than {mutant.seen}"
    return ""


def run(mutant: Mutant | None, tests: tuple[str, ...], interpreted: bool) -> Run:
    """Run the tests in a process of their own against a copy of the sources, with the bug if there is one."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        for source in sorted(ROOT.glob("packages/*/src/liger_*")):
            if not source.name.endswith(".egg-info"):
                shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            plant(mutant, folder)
        log = folder / "output.txt"
        process = FORKS.Process(target=run_tests, args=(name, tests, interpreted, str(log)))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
            return Run(-1, f"the tests took longer than {LIMIT:.0f} s", time.perf_counter() - start)
        output = log.read_text(errors="replace") if log.exists() else "the tests did not start"
        return Run(process.exitcode or 0, output, time.perf_counter() - start)


def run_tests(folder: str, tests: tuple[str, ...], interpreted: bool, log: str) -> None:
    """In a fork that has imported PyTorch and pytest, and nothing of ours."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in PACKAGES)
    if ours:
        raise SystemExit(f"the sources must be imported from the copy, but these are already imported: {', '.join(ours)}")
    # The path comes before installed packages, so that the copy is what the tests import.
    variables = {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "TRITON_INTERPRET": "1" if interpreted else "0"}
    os.environ.update(variables)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    import pytest

    code = int(pytest.main([*PYTEST, *tests]))
    foreign = [n for n, m in sys.modules.items() if n in PACKAGES and not (m.__file__ or "").startswith(folder)]
    sys.stdout.flush()
    os._exit(code if not foreign else 70)


def plant(mutant: Mutant, folder: Path) -> None:
    path = folder / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"mutant {mutant.name!r}: its pattern must occur once in {mutant.file}, it occurs {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main())
