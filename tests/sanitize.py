# SPDX-License-Identifier: Apache-2.0
"""Runs every kernel of a backend on its samples under compute-sanitizer: accesses outside tensors, and races in shared
memory.

One process a tool and op, at most `--together` at a time; every finding is printed with the sample that was running.
The samples are those of the conformance suite up to LARGE elements, forward and backward, in float32 and bfloat16.
"""

import contextlib
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

# A tool takes a program's time some hundredfold.
LARGE = 40_000
TOOLS = ("memcheck", "racecheck")


def main(
    ops: Annotated[list[str] | None, typer.Argument(help="ops to check; all if none is named")] = None,
    tool: Annotated[list[str] | None, typer.Option(help="memcheck or racecheck; both if none is named")] = None,
    backend: str = "triton",
    together: Annotated[int, typer.Option(help="processes at a time")] = 4,
    limit: Annotated[float, typer.Option(help="seconds for one op under one tool")] = 1800.0,
    plain: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check kernels for accesses outside their tensors and for races."""
    from liger_core.plugins import registry

    names = ops or list(registry().implementations[backend])
    if plain:
        for name in names:
            run(name, backend, plain)
        return
    if shutil.which("compute-sanitizer") is None:
        raise typer.BadParameter("compute-sanitizer must be on the PATH, but is not; it comes with the CUDA toolkit")
    jobs = [(name, kind) for kind in tool or TOOLS for name in names]
    with ThreadPoolExecutor(together) as pool:
        # Compiled first: the tools would slow the compiler, too.
        for code in pool.map(lambda name: command([], "memcheck", name, backend, limit)[0], names):
            if code:
                raise typer.Exit(code)
        clean = pool.map(lambda job: check(*job, backend, limit), jobs)
        failed = [job for job, ok in zip(jobs, clean, strict=True) if not ok]
    print(f"{len(jobs) - len(failed)} of {len(jobs)} clean")
    raise typer.Exit(bool(failed))


def check(name: str, tool: str, backend: str, limit: float) -> bool:
    """Whether one op is clean under one tool; prints what was found, with the sample before it."""
    began = time.monotonic()
    options = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    if tool == "racecheck":
        options += ["--racecheck-report", "analysis"]
    # PyTorch's own kernels (its random numbers, the matmuls of the linear losses) are not ours to check.
    options += [part for kernel in kernels() for part in ("--kernel-name", f"kernel_substring={kernel}")]
    code, lines = command(options, tool, name, backend, limit)
    samples = sum(line.startswith("sample ") for line in lines)
    clean = code == 0
    result = "clean" if clean else f"exit {code}"
    print(f"{tool} {name}: {samples} samples, {result}, {time.monotonic() - began:.0f} s", flush=True)
    if not clean:
        print("\n".join(f"    {line}" for line in lines[-200:]), flush=True)
    return clean


def kernels() -> list[str]:
    """The names of all kernels that liger-triton launches."""
    import liger_triton
    from liger_triton.launch import Launcher

    names = [module.name for module in pkgutil.iter_modules(liger_triton.__path__)]
    modules = [importlib.import_module(f"liger_triton.{name}") for name in names]
    launchers = [value for module in modules for value in vars(module).values() if isinstance(value, Launcher)]
    return sorted({launcher.kernel.fn.__name__ for launcher in launchers})


def command(wrapper: list[str], tool: str, name: str, backend: str, limit: float) -> tuple[int, list[str]]:
    """Run the samples of one op that a tool takes, under the tool or not."""
    here = [sys.executable, str(Path(__file__)), "--plain", tool, "--backend", backend, name]
    # Memory from the pool would hide an access beyond a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run([*wrapper, *here], env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return 124, [*output.splitlines(), f"took longer than {limit:.0f} s"]
    if done.returncode and not wrapper:
        print(done.stdout[-2000:], done.stderr[-4000:])
    return done.returncode, done.stdout.splitlines() + (done.stderr.splitlines() if done.returncode else [])


def run(name: str, backend: str, tool: str) -> None:
    """Every sample of an op that a tool takes, forward and backward."""
    import pytest
    import torch

    from conformance.cases import arguments_of, cases, differentiable, size
    from conformance.running import run as run_case

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for case in cases(device, backend, "all"):
        if case.op.name != name or case.dtype == torch.float16 or size(case.op, device, case.name) > LARGE:
            continue
        sample = case.sample()
        # racecheck 2025.3 breaks cuBLAS 13's products of bfloat16 on sm_90 (illegal address); the kernels beside them
        # are cross_entropy's.
        work = case.op.work(*sample.args, **sample.kwargs)
        if tool == "racecheck" and case.dtype == torch.bfloat16 and (work.full_products or work.full_flops):
            continue
        print(f"sample {case.id}", flush=True)
        arguments = arguments_of(case.op, sample)
        # A sample that the backend declines is skipped.
        with contextlib.suppress(pytest.skip.Exception):
            run_case(case.call, arguments, differentiable(arguments, sample))
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    typer.run(main)
