# SPDX-License-Identifier: Apache-2.0
"""What can be run here; `nox -l` lists it. Sessions share environments, so that torch installs once."""

import argparse
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tomllib
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
REQUIREMENTS = ROOT / "requirements.txt"
PACKAGES = [ROOT / folder for folder in re.findall(r"^-e (.+)$", REQUIREMENTS.read_text(), re.MULTILINE)]
CONSTRAINTS = ROOT / "constraints.txt"
# The packages and what they require; the same and what tests need besides; the newest versions, installed as README says; what the site needs.
SHARED, TESTS, LATEST, SITE = (ROOT / ".nox" / name for name in ("shared", "tests", "latest", "site"))
EDITABLE = ["-r", str(REQUIREMENTS)]
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
# What builds the packages; once, instead of in an environment for each.
BUILDS = ["setuptools>=77"]
RUNNERS = ["pytest", "pytest-xdist", "hypothesis"]
TOOLS = [*RUNNERS, "peft", "trl", "mypy", "sybil", "jupytext"]
SITE_TOOLS = ["mkdocs-material", "mkdocstrings-python", "ruff"]
# Optional libraries of training runs, without which their tests are skipped. They build and install in seconds, on Linux.
EXTRAS = ["apollo-torch", "bitsandbytes", "deepspeed", "galore-torch", "torchao"] if sys.platform == "linux" else []
# Whether nox has a pip that can install into the environments: making a pip for each takes nine seconds.
HAS_PIP = importlib.util.find_spec("pip") is not None
WORKERS = str(min(8, max(2, os.cpu_count() or 2)))
# For a run of minutes.
SHARE = ["--share", "1/48"]
PYTEST = ["-m", "pytest", "-n", WORKERS, "--device", "cpu"]
INTERPRETED = {"TRITON_INTERPRET": "1"}
# What README's reader tries first, with the newest versions; CI takes the quick ones.
QUICK_START = """
doctor
inspect tiny
plan --model tiny --device cpu
train --model tiny --steps 5 --batch 2 --sequence 64
""".strip().splitlines()
QUICK_START_FULL = """
ops
inspect llama
plan --model llama-3.2-1b --batch 16 --memory-limit 24GiB
demo --steps 4
bench rms_norm --quick
""".strip().splitlines()
# Where new versions of Transformers, Triton or huggingface_hub have broken something: what is replaced, the forward of a layer, the hub, commands, an op.
SAMPLE = shlex.split("""
tests/hf/test_replaced_counts.py tests/hf/test_residual.py tests/hf/test_hub.py tests/plan/test_adapters.py
tests/test_versions.py --share 1/5
""")
SAMPLE_OF_KERNELS = ["tests/ops/test_cross_entropy.py", "--backend", "triton"]
# A workload of every op at a shape that users have.
WORKLOADS = shlex.split("""
16384x8192 9x8192x4096 8192x128256 8192x4096x128256 8192x4096x151936 8192x4096x4096x128256-jsd 16384x2560x262144
32768x128x8x2048x768 16384x14336 16384x24576 1x128x512x512 32768x4096x4096x16 32768x4096x28672x16 16384x4x4096
16x4096x3072 4x4096x32+8x128 16384x4
""")
# Two sweeps within 24 GiB (docs/ablation.md); then larger ones in the memory of the whole GPU.
IN_24_GIB = "--model llama-3.2-1b --precision fp16 --shard zero3 --offload parameters --memory-limit 24GiB"
EIGHT_BILLION = "--model llama-3-8b --precision bf16-pure --sequence 512 --sweep batch=8,16,32,64,96,128"
TRAINING_RUNS = [
    f"{IN_24_GIB} --sweep batch=1,4,8,16,32,64,96,112",
    f"{IN_24_GIB} --batch 4 --sweep sequence=512,1024,2048,4096,8192,12288,16384,24576",
    f"{EIGHT_BILLION} --strategies none,all",
    f"{EIGHT_BILLION} --strategies all --checkpoint auto",
]
# Whole steps of each implementation, in the memory of an 80-GB card; the one that loads longest is the last.
IMPLEMENTATIONS = "--sweep implementation=hf,hf-compiled,liger-kernel,liger,liger-compiled"
OURS = "--sweep implementation=liger,liger-compiled"
STEPS = """
--model llama-3.2-1b --batch 8 --sequence 1024
--model llama-3-8b --batch 8 --sequence 2048 --precision bf16-pure
--model llama-3-8b --batch 8 --sequence 2048 --adapter lora
--model qwen3-4b --batch 8 --sequence 2048 --adapter lora
--model llama-3-8b --batch 8 --sequence 2048 --adapter qlora
--model gemma-3-1b --batch 4 --sequence 2048
--model qwen3-30b-a3b --batch 8 --sequence 2048 --adapter qlora
""".strip().splitlines()
# The numbers of ranks, up to the number of GPUs.
SCALED = "--model llama-3.2-1b --batch 8 --strategies none,all"
RANKS = (1, 2, 4)
# Recorded separately, since recording slows down the steps.
RECORDED = [
    f"{IN_24_GIB} --sweep batch=4,8 --strategies none,all --snapshot",
    f"{IN_24_GIB} --sweep batch=112 --strategies all --snapshot",
]

# The tests start many processes, each of which would compile all of its sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
# full and parity repeat tests, of sweep and techniques the tests take a part; bench, gpu and sanitize need or measure the machine.
nox.options.sessions = ["lint", "types", "tests", "docs", "mutants", "demo", "build"]


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff check, ruff format --check, and the words of docstrings, names and pages."""
    session.install("-c", str(CONSTRAINTS), "ruff", "pytest")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check", *session.posargs)
    # Without what tests of ops need: torch takes minutes to install.
    session.run("pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore", "tests/test_glossary.py")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Types: mypy, strict for liger_core."""
    python(session, "-m", "mypy", *(session.posargs or [str(p.relative_to(ROOT) / "src") for p in PACKAGES]))


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Tests on the CPU: plain PyTorch, a sample of compiled ops, the Triton kernels in their interpreter; a 48th of the slow ones.

    Arguments select tests, of which every case runs, for instance -- tests/hf -k rope.
    """
    session.posargs[:] = session.posargs or SHARE
    full(session)


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Like tests, with every slow one."""
    parts: list[Part] = [("plain PyTorch", ["tests"], {})]
    if sys.platform == "linux":
        kernels = ["tests/conformance", "tests/fuzz", "tests/ops", "--backend", "triton"]
        parts.append(("Triton's interpreter", kernels, INTERPRETED))
    every_part(session, environment_of_tests(session), parts)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The documentation site, in site/; warnings are errors. -- serve shows it at http://127.0.0.1:8000."""
    shared(session)
    executable = environment(session, SITE, *SITE_TOOLS, over=SHARED)
    session.run(executable, "docs/generate", "build/docs", external=True)
    # mkdocs-material prints a notice about MkDocs 2 at every start.
    env = {"NO_MKDOCS_2_WARNING": "1"}
    session.run(executable, "-m", "mkdocs", *(session.posargs or ["build"]), env=env, external=True)


@nox.session(venv_backend="none")
@nox.parametrize("backend", ["reference", "triton", "inductor"], ids=["reference", "triton", "inductor"])
def parity(session: nox.Session, backend: str) -> None:
    """One backend on the CPU against the definitions in float64, and the facts of every op."""
    env = INTERPRETED if backend == "triton" else {}
    pytest(session, "tests/conformance", "tests/ops", "--backend", backend, env=env)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Random calls of every op against formulas in float64, 1000 of each on every backend. A release takes more of them.

    For instance: -- --examples 10000 --backend reference; -- --seed 7 -k rope; -- --device cuda --examples 10000, compiled.
    """
    number = [] if "--examples" in session.posargs else ["--examples", "1000"]
    if "cuda" in session.posargs:
        session.run(here(session, "pytest"), "-m", "pytest", "tests/fuzz", *number, *session.posargs, external=True)
        return
    chosen = next((b for a, b in zip(session.posargs, session.posargs[1:], strict=False) if a == "--backend"), None)
    for backend in [chosen] if chosen else ["reference", "triton"] if sys.platform == "linux" else ["reference"]:
        env = INTERPRETED if backend == "triton" else {}
        pytest(session, "tests/fuzz", *number, *([] if chosen else ["--backend", backend]), env=env)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Plant known bugs, one at a time; the tests must turn red for each."""
    python(session, "tests/mutants/mutants.py", *session.posargs)


@nox.session(venv_backend="none")
def sweep(session: nox.Session) -> None:
    """Every causal language model type of Transformers, or those given, unpatched and patched; writes docs/models.md and can be interrupted."""
    python(session, "tests/hf/sweep.py", *session.posargs)


@nox.session(venv_backend="none")
def fits(session: nox.Session) -> None:
    """The data of the page `Will it fit?` and of the VRAM table, planned for common models, or those given. A second start resumes."""
    python(session, "docs/generate/fits.py", *session.posargs)


@nox.session(venv_backend="none")
def paper(session: nox.Session) -> None:
    """What 70B takes on 8 to 64 GPUs, as `liger plan` predicts it; writes docs/parallel-70b.md. A second start resumes."""
    python(session, "docs/generate/parallel_70b.py")


@nox.session(venv_backend="none")
def techniques(session: nox.Session) -> None:
    """Training runs on the CPU with techniques whose libraries first compile for half a minute."""
    python(session, "-m", "pytest", "--device", "cpu", "tests/train/techniques_that_compile.py", *session.posargs)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a small Llama on real text, with and without Liger: loss, memory, speed and two pictures."""
    liger(session, "demo", *session.posargs)


@nox.session(venv_backend="none")
def latest(session: nox.Session) -> None:
    """README's installation, so the newest versions that the metadata allows: quick start, tests, and what is replaced in each model type.

    It takes a 48th of the slow tests, or all with -- full. -- sample, for CI: a few tests, with the tested version of torch.
    """
    sample, executable = session.posargs == ["sample"], new_environment(LATEST)
    session.posargs[:] = [] if session.posargs in (["sample"], ["full"]) else SHARE
    if not sample:
        # A configuration file of pip may hold constraints.
        session.env["PIP_CONFIG_FILE"] = os.devnull
    torch_for_cpu(session, executable, *(["-c", str(CONSTRAINTS), "torch"] if sample else [required("torch")]))
    (line,) = re.findall(r"^pip install (-r .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    pip(session, executable, *shlex.split(line, comments=True))
    pip(session, executable, *RUNNERS, "peft", "trl")
    folder = session.create_tmp()
    quick_start(session, executable, folder, QUICK_START if sample else QUICK_START + QUICK_START_FULL)
    everything = ["tests/hf", "tests/plan", "tests/train", "tests/bench"]
    everything += sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/test_*.py"))
    parts: list[Part] = [("plain PyTorch", SAMPLE if sample else everything, {})]
    parts += [] if sample else [("conformance", ["tests/conformance"], {})]
    kernels = SAMPLE_OF_KERNELS if sample else ["tests/conformance", "--backend", "triton"]
    parts.append(("Triton's interpreter", kernels, INTERPRETED))
    every_part(session, str(executable), parts)


@nox.session(venv_backend="none")
def verify(session: nox.Session) -> None:
    """`liger verify --matrix` on the CPU: with Liger all must be right; what is wrong without it is shown. For instance: -- --model llama."""
    liger(session, "verify", "--matrix", "--liger", *session.posargs)
    liger(session, "verify", "--matrix", "--plain", *session.posargs, success_codes=[0, 1])


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Time, memory, accuracy and fraction of the roofline of every op. For instance: -- rms_norm --quick."""
    liger(session, "bench", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """All tests on a CUDA GPU, in the current environment if Liger and pytest are installed there. For instance: -- tests/ops -k rope."""
    arguments = selected(["tests", "--device", "cuda"], session.posargs) or session.posargs
    session.run(here(session, "pytest"), "-m", "pytest", *arguments, external=True)


@nox.session(venv_backend="none")
def sanitize(session: nox.Session) -> None:
    """Every kernel on its samples under compute-sanitizer (memcheck, racecheck), on a CUDA GPU. For instance: -- rope."""
    executable = here(session)
    session.chdir("tests")
    session.run(executable, "sanitize.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def benchmarks(session: nox.Session) -> None:
    """Every figure of docs/benchmarks/ops.md, on one otherwise idle CUDA GPU. A second start resumes the session.

    The folder of the results is an optional argument: -- benchmarks/results/2026-12-01-all-ops.
    """
    folder = next(iter(session.posargs), "results/all-ops")
    chosen = [word for name in WORKLOADS for word in ("--workload", name)]
    measured(session, "bench --peers --backend triton", *chosen, "--out", folder, "--resume")


@nox.session(venv_backend="none")
def steps(session: nox.Session) -> None:
    """Every figure of docs/benchmarks/steps.md, on one otherwise idle CUDA GPU of 80 GB. A second start resumes the session.

    The folder of the results is an optional argument, and words select models: -- benchmarks/results/2026-12-01-steps gemma.
    """
    folder, *words = session.posargs or ["results/steps"]
    for step in STEPS:
        if not words or any(word in step for word in words):
            # 1: an implementation failed; its row says why.
            measured(session, f"train {step} {IMPLEMENTATIONS}", "--out", folder, "--resume", success_codes=[0, 1])
            measured(session, f"train {step} {OURS} --profile", "--out", f"{folder}/traces", "--resume")
    session.run(here(session), "benchmarks/longest.py", "--out", folder, external=True, success_codes=[0, 1])


@nox.session(name="training-results", venv_backend="none")
def training_results(session: nox.Session) -> None:
    """Every figure of docs/training-results.md, on otherwise idle CUDA GPUs. A second start resumes the session.

    Optional arguments are the folder of the results and the GPUs: -- benchmarks/results/training-runs 0,1,2,3.
    """
    folder, *gpus = session.posargs or ["results/training-runs"]
    chosen = ["--gpus", *gpus] if gpus else []
    ranks = [str(count) for count in RANKS if count <= len("".join(gpus).split(","))]
    # FSDP2 needs several ranks to shard anything.
    shared = [("", ranks), (" --shard fsdp2", ranks[1:])] if len(ranks) > 1 else []
    sweeps_of_ranks = [f"{SCALED}{shard} --sweep ranks={','.join(counts)}" for shard, counts in shared]
    recorded = f"{folder}-recorded"
    for where, sweeps in ((recorded, RECORDED), (folder, TRAINING_RUNS + sweeps_of_ranks)):
        for swept in sweeps:
            measured(session, f"train {swept}", *chosen, "--out", where, "--resume")
    # If a run is in both folders, its row in the last one counts.
    pages = ["--docs", "docs/training-results.md", "--images", "docs/images/training-results"]
    measured(session, "report", recorded, folder, "--heading", "Training results", *pages)


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and sdists of all packages, in dist/; `pip install dist/*.whl` in a fresh environment, where the quick start runs."""
    session.install("-c", str(CONSTRAINTS), "build")
    temporary, folder = Path(session.create_tmp()).resolve(), ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        # The wheel is built from the sdist, so that a file that the sdist lacks is noticed.
        session.run("python", "-m", "build", "--outdir", str(folder), str(package))
    fresh = new_environment(temporary / "fresh")
    install(session, fresh, *map(str, folder.glob("*.whl")))
    modules = [package.name.replace("-", "_") for package in PACKAGES]
    code = f"import {', '.join(modules)}; print(liger_core.__version__, liger_core.__file__)"
    session.run(str(fresh), "-I", "-c", code, external=True)
    quick_start(session, fresh, temporary, QUICK_START)


def quick_start(session: nox.Session, executable: Path, folder: Path, commands: list[str]) -> None:
    """Run commands of Liger in a folder without its sources."""
    with session.chdir(folder):
        for command in commands:
            session.run(str(executable.with_name("liger")), *command.split(), external=True)


Part = tuple[str, list[str], dict[str, str]]


def every_part(session: nox.Session, executable: str, parts: list[Part]) -> None:
    """Run pytest for each part, also after one that failed; say at the end what came of each, and fail if one did."""
    results, failed = Path(session.create_tmp()), []
    parts = [(name, chosen, env) for name, arguments, env in parts if (chosen := selected(arguments, session.posargs))]
    if not parts:
        session.error(f"it has no tests in {' '.join(session.posargs)}")
    for name, arguments, env in parts:
        session.log(f"tests: {name}")
        words, codes = [*PYTEST, *arguments, f"--junitxml={results / name}.xml"], [0, 5] if session.posargs else [0]
        try:
            # 5: no test was collected, as when -k names one that only another run has.
            session.run(executable, *words, env=env, success_codes=codes, external=True)
        except CommandFailed:
            failed.append(name)
    for name, *_ in parts:
        session.log(f"{name}: {counted(results / f'{name}.xml')}{', FAILED' if name in failed else ''}")
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def counted(results: Path) -> str:
    """The result of pytest in a few words."""
    if not results.exists():
        return "no result"
    suite = next(ElementTree.parse(results).iter("testsuite"))
    found = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    passed = found.pop("tests") - sum(found.values())
    words = [f"{passed} passed", *(f"{count} {key}" for key, count in found.items() if count)]
    return f"{', '.join(words)} in {float(suite.get('time', '0')) / 60:.1f} min"


def pytest(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    every_part(session, environment_of_tests(session), [("pytest", list(args), env or {})])


def selected(arguments: list[str], posargs: list[str]) -> list[str]:
    """Return the arguments of pytest for what posargs select of a part of the tests, or an empty list if the part has none of their paths.

    Paths in posargs replace those of the part. A -k in posargs holds in addition to that of the part.
    """
    paths, keywords, options = parsed(arguments)
    new_paths, new_keywords, new_options = parsed(posargs)
    if new_paths:
        inside = [path for path in new_paths if any(file_of(path).is_relative_to(file_of(old)) for old in paths)]
        around = [old for old in paths if any(file_of(old).is_relative_to(file_of(path)) for path in new_paths)]
        paths = list(dict.fromkeys([*inside, *around]))
        if not paths:
            return []
    expression = " and ".join(f"({words})" for words in (keywords, new_keywords) if words)
    return [*paths, *options, *new_options, *(["-k", expression] if expression else [])]


def parsed(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """Return the paths among arguments of pytest, the expression of -k, and all other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-k", default="")
    known, others = parser.parse_known_args(arguments)
    return [a for a in others if file_of(a).exists()], known.k, [a for a in others if not file_of(a).exists()]


def file_of(path: str) -> Path:
    """Return the file or folder of a path that may name a test in it."""
    return ROOT / path.partition("::")[0]


def python(session: nox.Session, *args: str) -> None:
    """Run the Python of the environment for tests."""
    session.run(environment_of_tests(session), *args, external=True)


def liger(session: nox.Session, *args: str, success_codes: Iterable[int] = (0,)) -> None:
    """Run the `liger` command of the shared environment."""
    session.run(str(Path(shared(session)).with_name("liger")), *args, external=True, success_codes=success_codes)


def measured(session: nox.Session, command: str, *args: str, success_codes: Iterable[int] = (0,)) -> None:
    """Run a command of Liger where it is installed, with arguments that may have spaces."""
    words = ["-m", "liger_core", *command.split(), *args]
    session.run(here(session), *words, external=True, success_codes=success_codes)


def here(session: nox.Session, *modules: str) -> str:
    """The current environment's Python if Liger and these modules are installed there, else that of the environment for tests."""
    installed = all(map(importlib.util.find_spec, ("liger_core", *modules)))
    return sys.executable if installed else environment_of_tests(session)


def shared(session: nox.Session) -> str:
    """The Python of the environment of the commands: the packages, and nothing else that could slow them down or warn."""
    return environment(session, SHARED, "--no-build-isolation", *EDITABLE)


def environment_of_tests(session: nox.Session) -> str:
    """The Python of the environment for tests, which lies over the shared one."""
    shared(session)
    return environment(session, TESTS, *TOOLS, *EXTRAS, over=SHARED)


def environment(session: nox.Session, folder: Path, *what: str, over: Path | None = None) -> str:
    """The Python of an environment, which is rebuilt when its contents, a package's metadata or a constraint changed."""
    executable, stamp = executable_of(folder), folder / "stamp"
    parts = [p.read_bytes() for p in (*(p / "pyproject.toml" for p in PACKAGES), CONSTRAINTS)]
    wanted = hashlib.sha256(b"".join(parts) + repr((what, sys.version, ROOT)).encode()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == wanted):
        session.log(f"making the environment {folder.relative_to(ROOT)}")
        new_environment(folder, over)
        install(session, executable, *what)
        stamp.write_text(wanted)
    return str(executable)


def new_environment(folder: Path, over: Path | None = None) -> Path:
    """An empty one, or one in which everything of another one is there."""
    venv.create(folder, clear=True, with_pip=not HAS_PIP)
    if over is not None:
        packages, below = (sysconfig.get_path("purelib", "venv", {"base": str(f)}) for f in (folder, over))
        Path(packages, "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    return executable_of(folder)


def executable_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(session: nox.Session, executable: Path, *what: str) -> None:
    """pip install under the constraints."""
    constraints = CONSTRAINTS
    if has_gpu():
        # The CUDA build of torch requires the very Triton that it was built with.
        constraints = executable.parent.parent / "constraints.txt"
        constraints.write_text(re.sub(r"^triton==.*\n", "", CONSTRAINTS.read_text(), flags=re.MULTILINE))
    torch_for_cpu(session, executable, "-c", str(constraints), "torch")
    if "--no-build-isolation" in what:
        pip(session, executable, *BUILDS)
    pip(session, executable, "-c", str(constraints), *what)


def torch_for_cpu(session: nox.Session, executable: Path, *what: str) -> None:
    """Without a GPU the CPU build of torch, which is 3 GB smaller on Linux."""
    if not has_gpu() and sys.platform == "linux":
        # Where that index cannot be reached, the next command takes whatever build pip is configured to find.
        quick = ["--retries", "0", "--timeout", "15", "--no-deps", "--extra-index-url", CPU_TORCH]
        pip(session, executable, *quick, *what, codes=range(256))


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def pip(session: nox.Session, executable: Path, *what: str, codes: Iterable[int] = (0,)) -> None:
    # DeepSpeed builds its kernels when they are used, if at all. Python compiles the small part of all modules that is ever imported.
    command = [sys.executable, "-m", "pip", "--python", str(executable)] if HAS_PIP else [str(executable), "-m", "pip"]
    command += ["install", "--disable-pip-version-check", "--no-compile", *what]
    # Also under --install-only, which otherwise would leave an empty environment behind.
    session.run_install(*command, env={"DS_BUILD_OPS": "0"}, success_codes=codes, external=True)


def required(name: str) -> str:
    """What the packages require of a library."""
    projects = (tomllib.loads((p / "pyproject.toml").read_text())["project"] for p in PACKAGES)
    return next(line for each in projects for line in each["dependencies"] if re.match(rf"{name}\b", line))
