# SPDX-License-Identifier: Apache-2.0
"""`liger bench [OP]…`: the benchmark of the ops, and `liger bench scaling`, the same over one size."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from typer.core import TyperGroup

from liger_bench import machine, peers
from liger_bench.bench.implementations import Implementation, backend, peer
from liger_bench.bench.limits import measure_limits
from liger_bench.bench.measure import PASSES, ROUNDS, Bench
from liger_bench.bench.rows import HEADER, OpRow, measured
from liger_bench.bench.table import print_rows
from liger_bench.measurements import Files, check_known
from liger_bench.printing import AllColumns
from liger_bench.progress import progress_bar
from liger_core.errors import BackendError, OptionError
from liger_core.op import Op, Workload
from liger_core.plugins import Registry, registry
from liger_core.selection import use

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[OP]...", help="Ops to measure; all of them by default.", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32 (default on the CPU), bfloat16 (default on a GPU) or float16.")
]
Backends = Annotated[
    list[str] | None,
    typer.Option("--backend", help="A backend to measure; repeatable; all by default, the reference first."),
]
AllPeers = Annotated[bool, typer.Option("--peers", help="Also measure all other libraries that are installed.")]
SomePeers = Annotated[
    list[str] | None, typer.Option("--peer", help=f"Another library to measure; repeatable: {', '.join(peers.FILES)}.")
]
Passes = Annotated[
    list[str] | None, typer.Option("--pass", help=f"A pass to measure; repeatable; {', '.join(PASSES)}.")
]
Patterns = Annotated[
    list[str] | None, typer.Option("--workload", help="A workload by name, or several by a pattern; repeatable.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Only the small workloads, briefly.")]
Seconds = Annotated[float, typer.Option(min=0, help="How long each pass of an implementation is timed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Csv = Annotated[Path | None, typer.Option(help="File to append the rows to.")]
Out = Annotated[Path | None, typer.Option(help="Folder whose results.csv and results.json the rows are appended to.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help=(
            "Skip what --out already has of this commit, machine, versions and dtype, for instance after an "
            "interruption."
        ),
    ),
]
# Enough for stable medians on a GPU; all ops and other libraries then take minutes in total.
SECONDS = 0.1
DISPATCH = "dispatch"
# The command that `liger bench` runs without one.
DEFAULT = "ops"


@dataclass(frozen=True)
class BenchOptions:
    """The options of one run: what to measure and where to write the rows."""

    names: list[str]
    backends: list[str]
    passes: list[str]
    patterns: list[str]
    quick: bool
    scaling: bool
    files: Files
    resume: bool


@dataclass(frozen=True)
class OpJob:
    """One workload and what is measured on it."""

    op: Op[..., Any]
    workload: Workload
    implementations: list[Implementation]
    dispatch: bool


def _command(default_passes: tuple[str, ...], about: str, *, scaling: bool) -> Callable[..., None]:
    """Make one of the two commands, which differ in their workloads and default passes."""

    def command(
        names: Names = None,
        device: Device = "auto",
        dtype: Dtype = None,
        backends: Backends = None,
        all_peers: AllPeers = False,
        some_peers: SomePeers = None,
        passes: Passes = None,
        patterns: Patterns = None,
        quick: Quick = False,
        seconds: Seconds = SECONDS,
        as_json: AsJson = False,
        all_columns: AllColumns = False,
        csv: Csv = None,
        out: Out = None,
        resume: Resume = False,
    ) -> None:
        torch_device = machine.measurable_device("bench", device)
        precision = machine.named_dtype("bench", dtype, torch_device)
        if resume and out is None:
            raise OptionError("bench: --resume needs --out, the folder of the run to resume")
        files = Files("results", HEADER, out, csv)
        chosen = (names or [], backends or [], passes or list(default_passes), patterns or [])
        options = BenchOptions(*chosen, quick, scaling, files, resume)
        files.check()
        libraries = list(peers.FILES) if all_peers else some_peers or []
        variants, absent = _peers(libraries, torch_device, optional=all_peers)
        plan = _plan(registry(), options, variants, torch_device)
        with progress_bar() as bar:
            rows = list(_rows(plan, options, torch_device, precision, seconds, bar))
        if as_json:
            columns = [row.columns() for row in rows]
            print(json.dumps({"device": torch_device.type, "rows": columns, "unavailable": absent}))
        else:
            print_rows(rows, absent, all_columns=all_columns)
        if any(row.failed for row in rows):
            raise typer.Exit(1)

    command.__doc__ = f"{about}; exit code 1 if an implementation fails."
    return command


ops = _command(
    (*PASSES, DISPATCH), "Measure time, peak memory, accuracy and fraction of the roofline of every op", scaling=False
)
scaling = _command(
    ("full",),
    "Measure how the time of forward and backward (or the given passes) grows with each size of an op",
    scaling=True,
)


def _peers(names: list[str], device: torch.device, *, optional: bool) -> tuple[list[peers.Peer], dict[str, str]]:
    """Return the variants of the named peers, and why others are missing; only optional ones may be missing."""
    variants: list[peers.Peer] = []
    absent: dict[str, str] = {}
    check_known("bench", "--peer", names, peers.FILES)
    for name in names:
        reason = peers.unavailable(name, device)
        try:
            variants += peers.peers(name) if reason is None else []
        except Exception as error:
            reason = f"importing it failed: {type(error).__name__}: {error}"
        if reason is not None:
            absent[name] = reason
    if absent and not optional:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise OptionError(
            f"bench: --peer must name libraries that can run here, got {reasons}; --peers takes all that can"
        )
    return variants, absent


def _plan(registry: Registry, options: BenchOptions, variants: list[peers.Peer], device: torch.device) -> list[OpJob]:
    check_known("bench", "OP", options.names, sorted(registry.ops))
    for name in options.backends:
        _check_backend(registry, name, device)
    check_known("bench", "--pass", options.passes, (*PASSES, DISPATCH))
    plan: list[OpJob] = []
    for op in (registry.ops[name] for name in options.names or registry.ops):
        implementations = [backend(op, name) for name in _backends(registry, op, options.backends, device)]
        implementations += [peer(op, variant) for variant in variants if op.name in variant.calls]
        if set(options.passes) == {DISPATCH}:
            implementations = []
        workloads = [w for w in op.workloads() if _wanted(w, options)]
        plan += [OpJob(op, w, implementations, DISPATCH in options.passes and w is workloads[0]) for w in workloads]
    if not plan:
        raise OptionError(
            f"bench: something must be left to measure, got no workload for {' '.join(options.patterns) or 'these ops'}"
        )
    return plan


def _wanted(workload: Workload, options: BenchOptions) -> bool:
    if (workload.axis is not None) != options.scaling or (options.quick and not workload.quick):
        return False
    return not options.patterns or any(fnmatchcase(workload.name, pattern) for pattern in options.patterns)


def _check_backend(registry: Registry, name: str, device: torch.device) -> None:
    """Raise an error if a backend cannot run on the device; the selection reports unknown and unavailable ones."""
    use(name).undo()
    check_known("bench", "--backend", [name], sorted(registry.backends))
    if device.type not in registry.backends[name].device_types:
        kinds = " and ".join(registry.backends[name].device_types)
        raise BackendError(f"bench: backend {name!r} runs on {kinds} tensors, got --device {device.type}")


def _backends(registry: Registry, op: Op[..., Any], names: list[str], device: torch.device) -> list[str]:
    """Return the given backends in their order, or else all that run on this device, starting with the reference."""
    able = [
        name
        for name, table in registry.implementations.items()
        if op.name in table and device.type in registry.backends[name].device_types
    ]
    reference = [name for name in able if registry.implementations[name][op.name] is op.reference]
    return list(names) or [*reference, *(name for name in able if name not in reference)]


def _rows(
    plan: list[OpJob], options: BenchOptions, device: torch.device, dtype: torch.dtype, seconds: float, bar: Progress
) -> Iterator[OpRow]:
    """Measure each workload of the plan and yield its rows, which are also written at once."""
    where = machine.describe(device)
    done = measured(options.files.read(), where, device.type, machine.dtype_name(dtype)) if options.resume else set()
    plan = [left for left in (_left(job, options, done) for job in plan) if left.implementations or left.dispatch]
    task = bar.add_task("measuring the limits", total=1 + sum(len(job.implementations) for job in plan))
    if not plan:
        return
    limits = measure_limits(device, dtype, min(5 * seconds, 0.15) if options.quick else 5 * seconds)
    rounds = 2 if options.quick else ROUNDS
    run = Bench(device, dtype, limits, seconds, where, tuple(options.passes), rounds, not options.scaling)
    bar.advance(task)
    for job in plan:
        title = f"{job.op.name} {job.workload.name}"

        def show(what: str, title: str = title) -> None:
            bar.update(task, description=f"{title} {what}")

        show("")
        rows = run.measured(job.op, job.workload, job.implementations, show) if job.implementations else []
        if job.dispatch:
            rows.append(run.dispatch(job.op, job.workload))
        options.files.append([row.columns() for row in rows])
        bar.advance(task, len(job.implementations))
        yield from rows


def _left(job: OpJob, options: BenchOptions, done: set[tuple[str, str, str, str]]) -> OpJob:
    """Return what earlier runs have not measured.

    Evaluation rows do not count, because not every op has them.
    """
    of = (job.op.name, job.workload.name)

    passes = [name for name in options.passes if name in ("forward", "backward", "full")] or options.passes

    def has(name: str) -> bool:
        return (*of, name, "") in done or all((*of, name, measured_pass) in done for measured_pass in passes)

    left = [implementation for implementation in job.implementations if not has(implementation.name)]
    return replace(job, implementations=left, dispatch=job.dispatch and (*of, DISPATCH, DISPATCH) not in done)


class _OpsByDefault(TyperGroup):
    """Run the benchmark of the ops without a subcommand: `liger bench rope` is `liger bench ops rope`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


def bench_group() -> typer.Typer:
    """Return the group without commands; `liger_bench/plugin.py` registers them."""
    help = (
        f"Measure ops, and heads on several ranks. Without a command, `{DEFAULT}`: every op, for instance `liger bench "
        f"rms_norm --quick`, `liger bench --peers --out results`. `liger bench {DEFAULT} --help` lists its options."
    )
    return typer.Typer(cls=_OpsByDefault, help=help, subcommand_metavar="[COMMAND] [ARGS]...")
