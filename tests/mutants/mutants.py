# SPDX-License-Identifier: Apache-2.0
"""Plants each known bug in a copy of the sources and runs the tests that must see it: a green run is a failure."""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutant import Mutant
from planted import MUTANTS
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--tb=short", "--device", "cpu")
PACKAGES = ("liger_core", "liger_triton", "liger_inductor", "liger_hf", "liger_bench", "liger_train", "liger_verify")
LIMIT = 240.0
# Each run is a fork of one process that has imported what takes longest; that process imports nothing of ours.
FORKS = multiprocessing.get_context("forkserver")
LIBRARIES = ["torch._dynamo.backends.common", "pytest", "numpy", "hypothesis"]
OF_MODELS = ["transformers.trainer", "transformers.models.llama.modeling_llama", "peft"]

# Files and options of pytest, and what -k selects of them.
Slice = tuple[tuple[str, ...], str]


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
    parser.add_argument("--share", default="1/1", help="i/n: every n-th mutant, beginning with the i-th")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    number, of = map(int, options.share.split("/"))
    chosen = chosen[number - 1 :: of]
    runs: dict[Mutant, tuple[Run, str]] = {}
    # Triton is interpreted or not from its import on, so that the two kinds are not forks of one process.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for interpreted in (False, True):
            runs |= pool.submit(judged, [m for m in chosen if m.triton is interpreted], options.jobs).result()
    table = Table("planted bug", "file", "verdict", "seconds")
    failures = [(mutant, complaint, result) for mutant, (result, complaint) in runs.items() if complaint]
    for mutant, (result, complaint) in runs.items():
        table.add_row(
            mutant.name, mutant.file, f"[red]{complaint}[/red]" if complaint else "seen", f"{result.seconds:.0f}"
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for mutant, complaint, result in failures:
        console.rule(f"{mutant.name}: {complaint}")
        console.print(result.output[-2000:], markup=False, highlight=False)
    console.print(f"{len(chosen) - len(failures)} of {len(chosen)} planted bugs were seen")
    return 1 if failures or not chosen else 0


def judged(mutants: list[Mutant], jobs: int) -> dict[Mutant, tuple[Run, str]]:
    """What came of each mutant, and why it does not count as seen. All are interpreted, or none is."""
    interpreted = any(m.triton for m in mutants)
    os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
    # Libraries say what they miss while they are imported; what the tests write goes to files.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    FORKS.set_forkserver_preload(LIBRARIES + ([] if interpreted else OF_MODELS))
    with ThreadPoolExecutor(jobs) as pool:
        # What the tests of one file come to without a bug is found once for all mutants.
        together: dict[tuple[str, ...], set[str]] = {}
        for options, selected in map(slice_of, mutants):
            together.setdefault(options, set()).add(selected)
        wholes = [
            (options, "" if "" in each else " or ".join(f"({one})" for one in sorted(each)))
            for options, each in together.items()
        ]
        baselines = dict(zip(together, pool.map(lambda whole: run(None, whole), wholes), strict=True))
        runs = list(pool.map(lambda m: run(m, slice_of(m)), mutants))
    return {m: (result, judge(m, result, baselines[slice_of(m)[0]])) for m, result in zip(mutants, runs, strict=True)}


def slice_of(mutant: Mutant) -> Slice:
    file, _, test = mutant.test.partition("::")
    options = ("--backend", "triton") if mutant.triton else ()
    return (file, *options), f"{test} and ({mutant.cases})" if mutant.cases else test


def judge(mutant: Mutant, result: Run, baseline: Run) -> str:
    """Why this mutant does not count as seen, or nothing."""
    if baseline.code != 0:
        return "its tests fail without it"
    if result.code == 0:
        return "not seen"
    seen = mutant.seen or mutant.test.partition("::")[2]
    # The name of a test is in other errors, too; failed tests have the exit status 1.
    if seen not in result.output or not (mutant.seen or result.code == 1):
        return f"seen by something else than {seen}"
    return ""


def run(mutant: Mutant | None, tests: Slice) -> Run:
    """Run the tests in a process of their own against a copy of the sources, with the bug if there is one."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        for source in sorted(ROOT.glob("packages/*/src/liger_*")):
            if not source.name.endswith(".egg-info"):
                shutil.copytree(source, folder / source.name)
        if mutant is not None:
            path = folder / mutant.file
            path.write_text(mutant.planted(path.read_text()))
        log = folder / "output.txt"
        process = FORKS.Process(target=run_tests, args=(name, tests, str(log)))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
            return Run(-1, f"the tests took longer than {LIMIT:.0f} s", time.perf_counter() - start)
        output = log.read_text(errors="replace") if log.exists() else "the tests did not start"
        return Run(process.exitcode or 0, output, time.perf_counter() - start)


def run_tests(folder: str, tests: Slice, log: str) -> None:
    """In a fork that has imported libraries, and nothing of ours."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in PACKAGES)
    if ours:
        raise SystemExit(
            f"the sources must be imported from the copy, but these are already imported: {', '.join(ours)}"
        )
    # The path comes before installed packages, so that the copy is what the tests import.
    os.environ["PYTHONPATH"] = folder
    sys.path.insert(0, folder)
    os.chdir(ROOT)
    import pytest

    options, selected = tests
    code = int(pytest.main([*PYTEST, *options, *(["-k", selected] if selected else [])]))
    foreign = [n for n, m in sys.modules.items() if n in PACKAGES and not (m.__file__ or "").startswith(folder)]
    sys.stdout.flush()
    os._exit(code if not foreign else 70)


if __name__ == "__main__":
    sys.exit(main())
