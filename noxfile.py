# SPDX-License-Identifier: Apache-2.0
"""What can be run here; `nox -l` lists it. Sessions that need torch share one environment, so that it installs once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import venv
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = [ROOT / "packages" / name for name in ("liger-core", "liger-triton", "liger-hf", "liger-bench")]
CONSTRAINTS = ROOT / "constraints.txt"
SHARED = ROOT / ".nox" / "shared"
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "peft", "trl", "mypy"]
# What trainings can use besides; without them these tests are skipped. They build and install in seconds, on Linux.
EXTRAS = ["apollo-torch", "bitsandbytes", "deepspeed", "galore-torch", "torchao"] if sys.platform == "linux" else []
WORKERS = str(min(8, max(2, os.cpu_count() or 2)))
INTERPRETED = {"TRITON_INTERPRET": "1"}
# One sequence or batch that does not fit a GPU of 24 GiB, and one that does with Liger.
CAPPED = ["--shape", "16x1024", "--shape", "128x1024", "--shape", "4x8192", "--shape", "4x32768"]
# `liger bench` with these, one after the other: what else runs on the machine shows in the small shapes.
RELEASE = [
    ["--peers", "--backend", "triton", "--seconds", "0.1"],
    ["scaling", "--backend", "triton", "--seconds", "0.05"],
    ["model", "--model", "llama-3.2-1b", "--together", "5"],
    ["model", "--model", "llama-3-8b"],
    ["model", "--model", "llama-3.2-1b", "--memory-limit", "24GiB", *CAPPED, "--steps", "2", "--seconds", "1"],
]
# The two sweeps of the report that this project began with, as on its card; then larger ones on the whole card.
SEED = ["--model", "llama-3.2-1b", "--precision", "fp16", "--shard", "zero3", "--offload", "parameters", "--memory-limit", "24GiB"]
EIGHT_BILLION = ["--model", "llama-3-8b", "--precision", "bf16-pure", "--sequence", "512", "--sweep", "batch=8,16,32,64,96,128"]
TRAININGS = [
    [*SEED, "--sweep", "batch=1,4,8,16,32,64,96,112"],
    [*SEED, "--batch", "4", "--sweep", "sequence=512,1024,2048,4096,8192,12288,16384,24576"],
    [*EIGHT_BILLION, "--strategies", "none,all"],
    [*EIGHT_BILLION, "--strategies", "all", "--checkpoint", "auto"],
]
# With as many GPUs as there are, up to these.
SCALED = ["--model", "llama-3.2-1b", "--batch", "8", "--strategies", "none,all"]
RANKS = (1, 2, 4)
# Recorded apart from the others, since recording takes time.
RECORDED = [[*SEED, "--sweep", "batch=4,8", "--strategies", "none,all"], [*SEED, "--sweep", "batch=112", "--strategies", "all"]]

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
# parity repeats a part of tests, of sweep and techniques the tests take a part; bench, gpu and sanitize need or measure the machine.
nox.options.sessions = ["lint", "types", "tests", "mutants", "demo", "build"]


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff check and ruff format --check."""
    session.install("-c", str(CONSTRAINTS), "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", *session.posargs)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Types: mypy, strict for liger_core."""
    python(session, "-m", "mypy", *(session.posargs or [str(p.relative_to(ROOT) / "src") for p in PACKAGES]))


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All tests on the CPU: plain PyTorch, then the Triton kernels in their interpreter. For instance: -- -k rope."""
    pytest(session, "tests")
    if sys.platform == "linux":
        pytest(session, "tests/conformance", "tests/ops", "--backend", "triton", env=INTERPRETED)


@nox.session(venv_backend="none")
@nox.parametrize("backend", ["reference", "triton"], ids=["reference", "triton"])
def parity(session: nox.Session, backend: str) -> None:
    """One backend on the CPU against the definitions in float64, and the facts of every op."""
    pytest(session, "tests/conformance", "tests/ops", "--backend", backend, env=INTERPRETED if backend == "triton" else {})


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Plant known bugs, one at a time; the tests must turn red for each."""
    python(session, "tests/mutants/mutants.py", *session.posargs)


@nox.session(venv_backend="none")
def sweep(session: nox.Session) -> None:
    """Every causal language model type of Transformers, plain against patched; writes docs/models.md and can be interrupted."""
    python(session, "tests/hf/sweep.py", *session.posargs)


@nox.session(venv_backend="none")
def techniques(session: nox.Session) -> None:
    """Trainings on the CPU by techniques whose libraries compile for half a minute first."""
    python(session, "-m", "pytest", "--device", "cpu", "tests/train/techniques_that_compile.py", *session.posargs)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a small Llama on real text, plain and with Liger: loss, memory, speed and two pictures."""
    liger(session, "demo", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Time, memory, accuracy and share of the limit of every op. For instance: -- rms_norm --quick."""
    liger(session, "bench", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """All tests on a CUDA GPU, in the current environment if Liger is installed there."""
    session.run(here(session), "-m", "pytest", "tests", "--device", "cuda", *session.posargs, external=True)


@nox.session(venv_backend="none")
def sanitize(session: nox.Session) -> None:
    """Every kernel on its samples under compute-sanitizer (memcheck, racecheck), on a CUDA GPU. For instance: -- rope."""
    session.chdir("tests")
    session.run(here(session), "sanitize.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def benchmarks(session: nox.Session) -> None:
    """Every figure of docs/benchmarks.md, measured in half an hour on one CUDA GPU that nothing else uses. Started again, it goes on.

    The folder of the results may be given: -- benchmarks/results/2026-11-21-one-h200.
    """
    folder = next(iter(session.posargs), "results/release")
    for measured in RELEASE:
        session.run(here(session), "-m", "liger_core", "bench", *measured, "--out", folder, "--resume", external=True)
    session.run(here(session), "-m", "liger_core", "bench", "report", folder, "--docs", "docs/benchmarks.md", external=True)


@nox.session(venv_backend="none")
def trainings(session: nox.Session) -> None:
    """Every figure of docs/trainings.md, on CUDA GPUs that nothing else uses. Started again, it goes on.

    The folder of the results may be given, and the GPUs: -- benchmarks/results/trainings 0,1,2,3.
    """
    folder, *gpus = session.posargs or ["results/trainings"]
    chosen = ["--gpus", *gpus] if gpus else []
    ranks = [str(count) for count in RANKS if count <= len("".join(gpus).split(","))]
    # FSDP2 has nothing to split on one.
    shared = [([], ranks), (["--shard", "fsdp2"], ranks[1:])] if len(ranks) > 1 else []
    sweeps_of_ranks = [[*SCALED, *shard, "--sweep", f"ranks={','.join(counts)}"] for shard, counts in shared]
    recorded = f"{folder}-recorded"
    for where, sweeps, more in ((recorded, RECORDED, ["--snapshot"]), (folder, TRAININGS + sweeps_of_ranks, [])):
        for swept in sweeps:
            session.run(here(session), "-m", "liger_core", "train", *swept, *chosen, *more, "--out", where, "--resume", external=True)
    # Of a training in both folders the row in the last one counts.
    pages = ["--html", f"{folder}/report.html", "--docs", "docs/trainings.md"]
    session.run(here(session), "-m", "liger_core", "report", recorded, folder, *pages, external=True)


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and sdists of the four packages, installed with their constraints into a fresh environment and imported."""
    session.install("-c", str(CONSTRAINTS), "build")
    folder = Path(session.create_tmp()) / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        # The wheel is built from the sdist, so that a file that the sdist lacks is noticed.
        session.run("python", "-m", "build", "--outdir", str(folder), str(package))
    fresh = new_environment(Path(session.create_tmp()) / "fresh")
    install(session, fresh, *(str(wheel) for wheel in sorted(folder.glob("*.whl"))))
    imports = "import liger_core, liger_triton, liger_hf, liger_bench; print(liger_core.__version__, liger_core.__file__)"
    session.run(str(fresh), "-I", "-c", imports, external=True)
    session.run(str(fresh.with_name("liger")), "doctor", external=True)


def pytest(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    # 5: no test was collected, as when -k names one that only the other run has.
    codes = [0, 5] if session.posargs else [0]
    python(session, "-m", "pytest", "-n", WORKERS, "--device", "cpu", *args, *session.posargs, env=env or {}, codes=codes)


def python(session: nox.Session, *args: str, env: dict[str, str] | None = None, codes: list[int] | None = None) -> None:
    """Run the shared environment's Python."""
    session.run(shared(session), *args, env=env or {}, success_codes=codes or [0], external=True)


def liger(session: nox.Session, *args: str) -> None:
    """Run the `liger` command of the shared environment."""
    session.run(str(Path(shared(session)).with_name("liger")), *args, external=True)


def here(session: nox.Session) -> str:
    """The current environment's Python if Liger is installed there, else the shared one's."""
    return sys.executable if importlib.util.find_spec("liger_core") is not None else shared(session)


def shared(session: nox.Session) -> str:
    """The Python of the shared environment, which is made anew when a package's metadata or a constraint changed."""
    executable, stamp = executable_of(SHARED), SHARED / "stamp"
    parts = [*(p / "pyproject.toml" for p in PACKAGES), CONSTRAINTS, Path(__file__)]
    wanted = hashlib.sha256(b"".join(p.read_bytes() for p in parts) + sys.version.encode() + str(ROOT).encode()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == wanted):
        session.log(f"making the shared environment {SHARED.relative_to(ROOT)}")
        new_environment(SHARED)
        install(session, executable, *TOOLS, *EXTRAS, *(part for p in PACKAGES for part in ("-e", str(p))))
        stamp.write_text(wanted)
    return str(executable)


def new_environment(folder: Path) -> Path:
    venv.create(folder, clear=True, with_pip=True)
    return executable_of(folder)


def executable_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(session: nox.Session, executable: Path, *what: str) -> None:
    """pip install under the constraints; without a GPU the CPU build of torch, which is 3 GB smaller on Linux."""
    constraints, has_gpu = CONSTRAINTS, shutil.which("nvidia-smi") is not None
    pip = [str(executable), "-m", "pip", "install", "--disable-pip-version-check"]
    if has_gpu:
        # The CUDA build of torch requires the very Triton that it was built with.
        constraints = executable.parent.parent / "constraints.txt"
        constraints.write_text("".join(line for line in CONSTRAINTS.read_text().splitlines(True) if not line.startswith("triton==")))
    elif sys.platform == "linux":
        # Where that index cannot be reached, the next command takes whatever build pip is configured to find.
        quick = ["--retries", "0", "--timeout", "15", "--no-deps", "--extra-index-url", CPU_TORCH]
        session.run(*pip, *quick, "-c", str(constraints), "torch", success_codes=range(256), external=True)
    # DeepSpeed builds its kernels when they are used, if at all.
    session.run(*pip, "-c", str(constraints), *what, env={"DS_BUILD_OPS": "0"}, external=True)
