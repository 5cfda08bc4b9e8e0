# SPDX-License-Identifier: Apache-2.0
"""Run a step on one process and on several, and measure how much their losses and gradients differ."""

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessContext, ProcessException

from liger_core.errors import DeviceError, OptionError
from liger_verify.report import Difference, Report
from liger_verify.world import Step, World

TRUTH = "truth.pt"
# The errors of the gradients of one process in float32.
ROUNDING = "rounding.pt"
# The suffix of the file in which a process says why it failed.
FAILURE = ".failure"
# Modules that most steps import; the fork server imports them once.
LIBRARIES = [
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "liger_verify.training",
]
# Several processes sum in another order, so their round-off may be this many times larger.
ORDER = 10.0
DEVICES = ("cpu", "cuda")


class StepRun(NamedTuple):
    """The processes of one run of a step.

    folder    the folder with the result of the one process, which all runs of the step share
    results   the folder for the results of this run
    patience  seconds that a process waits for another one
    on_gpus   whether each process has a GPU of its own
    """

    step: Step
    ranks: int
    folder: str
    results: str
    patience: float
    on_gpus: bool = False


def compare(
    step: Step,
    *,
    ranks: int,
    sizes: Mapping[str, int] | None = None,
    tolerance: float = 1e-4,
    patience: float = 600.0,
    device: str = "cpu",
) -> Report:
    """Run a training step on one process in float64, then on `ranks` processes, and report where they differ.

    step       `step(world)` builds its model, runs forward and backward over the same global batch whatever world.ranks
               is, and returns the loss and the gradients by name; see `liger_verify.Step`. It must be importable, since
               every process calls it: a function of a module or an instance of a class, no lambda
    ranks      processes; in each the process group is initialized and world.dtype is torch's default dtype
    sizes      name → ranks of each dimension of the setup, {"tp": 2, "dp": 4}, and any other factor by which a gradient
               could be wrong; the report names the one that explains a difference
    tolerance  relative error of the loss or a gradient that passes. In float32 round-off is about 1e-6. Where a
               gradient differs, the step also runs on one process in float32, and ten times the error of that passes,
               too: a gradient that is 0 by nature is round-off
    patience   seconds that a process may wait for another one
    device     "cpu", with gloo, or "cuda": each rank has a GPU, with NCCL. The one process always runs on the CPU
    returns    `Report`; `report.right` if nothing differs, and `print(report)` explains a difference

    Raises OptionError for fewer than two ranks and for an unknown device, and DeviceError for more ranks than GPUs. An
    exception in a process ends all of them and is raised here.
    """
    check(ranks, tolerance, device)
    with TemporaryDirectory(prefix="liger-verify-") as folder:
        leave_truth(step, folder, patience=patience)
        options: dict[str, Any] = {"tolerance": tolerance, "patience": patience, "device": device}
        return compare_with_truth(step, folder, ranks=ranks, sizes=sizes, **options)


def check(ranks: int, tolerance: float, device: str) -> None:
    """Raise OptionError for arguments that `compare` does not accept."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2:
        raise OptionError(
            "compare: ranks must be an integer of at least 2, since one process is what they are compared with, got "
            f"{ranks!r}"
        )
    if not tolerance > 0:
        raise OptionError(f"compare: tolerance must be > 0, got {tolerance!r}")
    if device not in DEVICES:
        raise OptionError(f"compare: device must be {' or '.join(DEVICES)}, got {device!r}")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise DeviceError(
            f"compare: {ranks} ranks need a GPU each, PyTorch finds {torch.cuda.device_count()}; use fewer ranks or "
            "the CPU"
        )


def leave_truth(step: Step, folder: str, *, patience: float, limit: float | None = None) -> None:
    """Run a step on one process in float64, and save the result in the folder for later comparisons."""
    _start(_alone, StepRun(step, 1, folder, folder, patience), limit)


def compare_with_truth(
    step: Step,
    folder: str,
    *,
    ranks: int,
    sizes: Mapping[str, int] | None = None,
    tolerance: float = 1e-4,
    patience: float = 600.0,
    limit: float | None = None,
    device: str = "cpu",
) -> Report:
    """Run a step on `ranks` processes, for `limit` seconds at most, and compare it with the truth in the folder."""
    with TemporaryDirectory(prefix="liger-verify-") as results:
        _start(_rank, StepRun(step, ranks, folder, results, patience, device == "cuda"), limit)
        truth = torch.load(Path(folder, TRUTH), weights_only=True)
        measured = [torch.load(Path(results, f"{rank}.pt"), weights_only=True) for rank in range(ranks)]
    sizes = {"ranks": ranks, **(sizes or {})}
    report = report_of(truth, measured, sizes, tolerance)
    if not report.wrong:
        return report
    return report_of(truth, measured, sizes, tolerance, _rounding(step, folder, patience, limit))


def _rounding(step: Step, folder: str, patience: float, limit: float | None) -> dict[str, float]:
    """Return the error of one process's gradients in float32, which is needed only if something differs."""
    path = Path(folder, ROUNDING)
    if not path.is_file():
        # A user's step may refuse float32 on one process; then only the tolerance counts.
        with contextlib.suppress(ProcessException, TimeoutError):
            _start(_rounded, StepRun(step, 1, folder, folder, patience), limit)
    return torch.load(path, weights_only=True) if path.is_file() else {}


def _start(work: Callable[[int, StepRun], None], run: StepRun, limit: float | None) -> None:
    # Forks of a server that has imported PyTorch start fast. Platforms without forks start new interpreters, and so do
    # ranks on GPUs: some libraries use CUDA when they are imported, after which a fork cannot.
    can_fork = "forkserver" in multiprocessing.get_all_start_methods() and not run.on_gpus
    method = "forkserver" if can_fork else "spawn"
    if method == "forkserver":
        # No effect if the server already runs.
        multiprocessing.get_context(method).set_forkserver_preload(LIBRARIES)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = torch.multiprocessing.start_processes(
        _work, (work, run, store.port), nprocs=run.ranks, join=False, start_method=method
    )
    try:
        _wait(started, limit)
    except ProcessException as error:
        error.add_note(_cause(started, run, error))
        raise


def _wait(started: ProcessContext, limit: float | None) -> None:
    end = None if limit is None else time.monotonic() + limit
    try:
        while not started.join(None if end is None else max(0.0, end - time.monotonic())):
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"it was ended after {limit:g} s, the limit")
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _cause(started: ProcessContext, run: StepRun, error: Exception) -> str:
    """Return the error of the process that failed first, in one line."""
    for rank, process in enumerate(started.processes):
        code = process.exitcode or 0
        # 1 is an exception, and SIGTERM ends the remaining processes.
        if code not in (0, 1, -signal.SIGTERM):
            return f"rank {rank} ended with {f'exit code {code}' if code > 0 else signal.Signals(-code).name}"
    failures = sorted(Path(run.results).glob(f"*{FAILURE}"), key=lambda path: path.stat().st_mtime_ns)
    return failures[0].read_text() if failures else str(error).strip().splitlines()[-1]


def _alone(rank: int, run: StepRun) -> None:
    loss, gradients = run.step(World(0, 1, torch.float64, Path(run.folder)))
    whole_gradients = {name: None if g is None else _whole(g).double() for name, g in gradients.items()}
    torch.save({"loss": float(loss), "gradients": whole_gradients}, Path(run.folder, TRUTH))


def _rounded(rank: int, run: StepRun) -> None:
    truth = torch.load(Path(run.folder, TRUTH), weights_only=True)["gradients"]
    _, gradients = run.step(World(0, 1, torch.float32, Path(run.folder)))
    apart = {
        name: measure(None if g is None else _whole(g), truth.get(name)).get("apart", math.nan) ** 0.5
        for name, g in gradients.items()
    }
    finite = {name: distance for name, distance in apart.items() if math.isfinite(distance)}
    torch.save(finite, Path(run.folder, ROUNDING))


def _rank(rank: int, run: StepRun) -> None:
    truth = torch.load(Path(run.folder, TRUTH), weights_only=True)["gradients"]
    device = torch.device("cuda", rank) if run.on_gpus else torch.device("cpu")
    loss, gradients = run.step(World(rank, run.ranks, torch.float32, Path(run.folder), device))
    measured: dict[str, dict[str, float]] = {}
    # The same names in the same order on every rank, because each gradient needs collectives.
    for name in dict.fromkeys((*truth, *gradients)):
        gradient = gradients.get(name)
        whole = None if gradient is None else _whole(gradient).cpu()
        sums = _sums(whole, truth.get(name))
        if name in gradients:
            measured[name] = measure(whole, truth.get(name)) | sums
    torch.save({"loss": float(loss), "gradients": measured}, Path(run.results, f"{rank}.pt"))
    dist.barrier()


def _work(rank: int, work: Callable[[int, StepRun], None], run: StepRun, port: int) -> None:
    # The output of libraries must not end up in tables and JSON.
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.ranks, "LOCAL_WORLD_SIZE": run.ranks}
    os.environ |= {name: str(number) for name, number in (numbers | {"MASTER_PORT": port}).items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        if run.on_gpus:
            torch.cuda.set_device(rank)
        # The comparison itself is on the CPU.
        backend = "cpu:gloo,cuda:nccl" if run.on_gpus else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=run.patience))
        work(rank, run)
    except Exception as error:
        Path(run.results, f"{rank}{FAILURE}").write_text(f"rank {rank}: {type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()


def _whole(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def measure(gradient: Tensor | None, truth: Tensor | None) -> dict[str, float]:
    """Return the numbers that distinguish a wrong gradient from a right one, such as its product with the true one.

    These are enough: the squared distance to a multiple k of the truth is |g|² - 2k g·t + k² |t|².
    """
    if truth is None or gradient is None or gradient.shape != truth.shape:
        return {
            # If no loss depends on a parameter, None and 0 are equal.
            "missing": float(gradient is None or (truth is None and not gradient.any())),
            "unknown": float(truth is None),
            "shape": float(gradient is not None and truth is not None),
        }
    whole = gradient.double()
    return {
        "square": float(whole.square().sum()),
        "product": float((whole * truth).sum()),
        "apart": float((whole - truth).square().sum()),
        "truth": float(truth.square().sum()),
    }


def _sums(gradient: Tensor | None, truth: Tensor | None) -> dict[str, float]:
    """Return the same numbers for the sum over ranks, to which a rank without a gradient adds nothing."""
    if truth is None:
        return {}
    fits = gradient is not None and gradient.shape == truth.shape
    added = gradient.double().clone() if gradient is not None and fits else torch.zeros_like(truth)
    dist.all_reduce(added)
    return {"sum square": float(added.square().sum()), "sum product": float((added * truth).sum())}


def report_of(
    truth: Any, measured: list[Any], sizes: dict[str, int], tolerance: float, rounding: dict[str, float] | None = None
) -> Report:
    """Return the comparison of all ranks from the measurements of each.

    rounding  the error of each gradient that float32 explains
    """
    names = dict.fromkeys(name for rank in measured for name in rank["gradients"])
    gradients = {name: [rank["gradients"].get(name) for rank in measured] for name in names}
    known = {name: gradient for name, gradient in truth["gradients"].items() if gradient is not None}
    norm = float(sum(gradient.square().sum() for gradient in known.values())) ** 0.5
    # An element that is 0 by nature is a sum of terms that cancel, each as precise as float32.
    element = (
        torch.finfo(torch.float32).eps * norm / max(sum(gradient.numel() for gradient in known.values()), 1) ** 0.5
    )
    explained = {
        name: max(element * gradient.numel() ** 0.5, ORDER * (rounding or {}).get(name, 0.0))
        for name, gradient in known.items()
    }
    differences = [
        Difference.of(name, ranks, explained.get(name, 0.0) / tolerance) for name, ranks in gradients.items()
    ]
    missing = [name for name in known if name not in gradients]
    unused = [name for name, gradient in truth["gradients"].items() if gradient is None]
    rounded = [d.name for d in differences if d.error <= tolerance and not _within(gradients[d.name], tolerance)]
    losses = [rank["loss"] for rank in measured]
    return Report(truth["loss"], losses, norm, differences, missing, sizes, tolerance, unused, rounded)


def _within(ranks: list[dict[str, float] | None], tolerance: float) -> bool:
    """Return whether a gradient passes by the tolerance alone."""
    return all(
        rank is None or rank.get("apart", 0.0) ** 0.5 <= tolerance * rank.get("truth", 0.0) ** 0.5 for rank in ranks
    )
