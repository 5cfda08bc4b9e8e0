# SPDX-License-Identifier: Apache-2.0
"""Plants each known bug in a copy of the sources and runs the tests that must see it: a green run is a failure."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
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
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", "--device", "cpu")
LIMIT = 240.0


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
    """Run the tests against a copy of the sources, with the bug if there is one."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        for source in sorted(ROOT.glob("packages/*/src/liger_*")):
            if not source.name.endswith(".egg-info"):
                shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            plant(mutant, folder)
        # The path comes before installed packages, so that the copy is what the tests import.
        variables = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        variables["TRITON_INTERPRET"] = "1" if interpreted else "0"
        try:
            done = subprocess.run([*PYTEST, *tests], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return Run(-1, f"the tests took longer than {LIMIT:.0f} s", time.perf_counter() - start)
    return Run(done.returncode, done.stdout + done.stderr, time.perf_counter() - start)


def plant(mutant: Mutant, folder: Path) -> None:
    path = folder / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"mutant {mutant.name!r}: its pattern must occur once in {mutant.file}, it occurs {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main())
