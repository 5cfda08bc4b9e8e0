# SPDX-License-Identifier: Apache-2.0
"""Measure a workload pass by pass, with its implementations interleaved."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from liger_bench import machine
from liger_bench.bench.case import Case, CaseRun, Errors, Results, make_case
from liger_bench.bench.graph import capture
from liger_bench.bench.implementations import BACKEND, PEER, Implementation, peer
from liger_bench.bench.limits import Limits
from liger_bench.bench.rows import OpRow
from liger_bench.bench.timing import Samples, Stopwatch, quantile, repetitions, time_call
from liger_bench.memory import held_bytes, peak_bytes
from liger_bench.peers import eager
from liger_core.errors import BackendError, Unsupported
from liger_core.op import Choice, Op, Workload
from liger_core.selection import settle

PASSES = ("forward", "backward", "full", "evaluation")
ROUNDS = 5
# The host does not slow down a longer call, and capturing it would take its memory a second time.
GRAPH_LONGEST_MS = 5.0
DISPATCHES = 200
WARM_SECONDS = 0.1
# A call that is repeated this often in a round is short, and the clocks before it do not matter.
MANY = 10
Figures = dict[str, Any]
Seconds = dict[str, float]
Show = Callable[[str], object]


@dataclass
class ImplementationState:
    """The state of one implementation on one workload.

    refused  pass → why it has no figures; the key "" stands for all passes
    """

    implementation: Implementation
    run: CaseRun = field(init=False)
    errors: Errors | None = None
    samples: dict[str, Samples] = field(default_factory=dict)
    figures: dict[str, Figures] = field(default_factory=dict)
    refused: dict[str, Figures] = field(default_factory=dict)

    @contextmanager
    def record_errors(self, name: str) -> Iterator[None]:
        """Select the implementation within this context, and record an error as the reason for missing figures."""
        try:
            with self.implementation.selected():
                yield
        except Unsupported as error:
            self.refused[name] = {"reason": str(error), "failed": False}
        except BackendError as error:
            self.refused[name] = {"reason": str(error), "failed": not isinstance(error.__cause__, Unsupported)}
        except torch.OutOfMemoryError as error:
            self.refused[name] = {"reason": f"out of memory: {error}".splitlines()[0], "failed": False}
        except Exception as error:
            self.refused[name] = {"reason": f"{type(error).__name__}: {error}".splitlines()[0], "failed": True}
        if name in self.refused and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Bench:
    """A run of the benchmark.

    seconds   how long each pass of an implementation is timed
    where     the columns on machine, versions, commit and date
    accuracy  whether results are compared with float64, which takes longer than timing them
    """

    device: torch.device
    dtype: torch.dtype
    limits: Limits
    seconds: float
    where: dict[str, str]
    passes: tuple[str, ...] = PASSES
    rounds: int = ROUNDS
    accuracy: bool = True

    def measured(
        self, op: Op[..., Any], workload: Workload, implementations: Iterable[Implementation], show: Show
    ) -> list[OpRow]:
        """Measure a workload; if its inputs do not fit into memory, the rows say so."""
        try:
            case = make_case(op, workload, self.device, self.dtype)
        except torch.OutOfMemoryError as error:
            reason = f"out of memory for the inputs: {error}".splitlines()[0]
            return [self._row(op, workload, i.name, i.kind, "", reason=reason) for i in implementations]
        if self.accuracy:
            show("in float64")
            with suppress(torch.OutOfMemoryError):
                case.set_exact()
        return self.rows(case, implementations, show)

    def rows(self, case: Case, implementations: Iterable[Implementation], show: Show = lambda _: None) -> list[OpRow]:
        """Measure every pass of every implementation; a row without figures has the reason."""
        gc.collect()
        states = [ImplementationState(implementation) for implementation in implementations]
        plain = self._plain(case)
        for state in states:
            show(state.implementation.name)
            with state.record_errors(""):
                state.run = self._checked(case, state)
        # The float64 results are the largest tensors here.
        case.exact = None
        floors: list[Seconds] = []

        def floor() -> None:
            # Matmuls drift with the clocks of a busy device; the limits of memory-bound ops are measured once per run.
            if not floors or case.work().full_products:
                floors.append(self.limits.least_seconds(case.work(), case.trained))

        for name in PASSES:
            if name in self.passes and (name != "evaluation" or case.evaluates):
                self._timed(name, [state for state in states if "" not in state.refused], show, floor)
        if not floors:
            floor()
        least = {name: quantile([taken[name] for taken in floors], 0.5) for name in floors[0]}
        copies: Seconds = {}
        with suppress(torch.OutOfMemoryError):
            copies = self.limits.copy_seconds(case.work())
        return [row for state in states for row in self._rows(case, state, plain, least, copies)]

    def dispatch(self, op: Op[..., Any], workload: Workload) -> OpRow:
        """Measure what an op costs before its implementation runs: an empty implementation minus an empty call."""

        def nothing(*args: Any, **kwargs: Any) -> None:
            return None

        def chosen() -> None:
            for _ in range(DISPATCHES):
                op(*bound.args, **bound.kwargs)

        def direct() -> None:
            for _ in range(DISPATCHES):
                nothing(*bound.args, **bound.kwargs)

        bound = op.signature.bind(**make_case(op, workload, self.device, self.dtype).arguments)
        settle()
        choice = op.choice
        try:
            op.choice = Choice({}, {}, nothing, nothing)
            # Only the host works here, wherever the arguments are.
            through, without = (time_call(call, torch.device("cpu"), self.seconds) for call in (chosen, direct))
        finally:
            op.choice = choice
        taken = [(ms - without.median_ms) / DISPATCHES for ms in (through.median_ms, through.low_ms, through.high_ms)]
        figures = {"median_ms": taken[0], "low_ms": taken[1], "high_ms": taken[2], "enqueue_ms": taken[0]}
        count = through.repetitions * DISPATCHES
        return self._row(op, workload, "dispatch", BACKEND, "dispatch", repetitions=count, **figures)

    def _plain(self, case: Case) -> Errors | None:
        """Return the errors of plain eager PyTorch in the same dtype, or None if they are unknown."""
        if case.exact is None or case.op.name not in eager.calls():
            return None
        state = ImplementationState(peer(case.op, eager.peers()[0]))
        with state.record_errors(""):
            return case.errors(CaseRun(case, state.implementation).full())
        return None

    def _checked(self, case: Case, state: ImplementationState) -> CaseRun:
        """Run forward and backward once, to measure the errors and check that the inputs are unchanged."""
        before = case.fingerprints()
        run = CaseRun(case, state.implementation)
        state.errors = case.errors(run.full())
        changed = [name for name, sums in case.fingerprints().items() if sums != before[name]]
        if changed:
            case.refill()
            raise ValueError(f"it overwrote {', '.join(changed)}, which nothing declares")
        return run

    def _timed(self, name: str, states: list[ImplementationState], show: Show, floor: Callable[[], None]) -> None:
        watch = Stopwatch(self.device)
        counts: dict[str, int] = {}
        for state in states:
            show(f"{state.implementation.name} {name}")
            with state.record_errors(name):
                counts[state.implementation.name] = self._prepared(name, state, watch)
        # Round by round: a clock that drifts affects all implementations alike.
        for _ in range(self.rounds):
            if name in ("full", "evaluation"):
                floor()
            for state in states:
                if name not in state.refused:
                    with state.record_errors(name):
                        self._round(name, state, watch, counts[state.implementation.name])
        for state in states:
            if name not in state.refused:
                with state.record_errors(name):
                    state.figures[name] |= self._replayed(name, state, watch)

    def _prepared(self, name: str, state: ImplementationState, watch: Stopwatch) -> int:
        """Measure the memory, which also warms up, and return the number of calls in a round."""
        call, before = state.run.passes[name]()
        before()
        returned: list[Results] = []
        # Releases by the garbage collector would confuse the CPU profiler, but not the allocator of a GPU.
        peak = peak_bytes(lambda: returned.append(call()), self.device, collect=self.device.type == "cpu")
        argument_addresses = {
            v.untyped_storage().data_ptr() for v in state.run.arguments.values() if isinstance(v, Tensor)
        }
        gradients = [g for g in returned.pop().gradients if g.untyped_storage().data_ptr() not in argument_addresses]
        state.figures[name] = {"peak_extra_bytes": peak, "peak_beyond_gradients_bytes": peak - held_bytes(gradients)}
        state.samples[name] = Samples()
        return repetitions(self.seconds / self.rounds, watch.seconds(call, before), 1, 200)

    def _round(self, name: str, state: ImplementationState, watch: Stopwatch, count: int) -> None:
        call, before = state.run.passes[name]()
        # The implementation before left its state in caches, allocator and clocks (matmuls lower them by a tenth within
        # 100 ms). These calls replace it by the implementation's own.
        started, least = time.perf_counter(), WARM_SECONDS if count < MANY and self.device.type != "cpu" else 0.0
        while count > 1 or least:
            before()
            call()
            if least:
                torch.cuda.synchronize(self.device)
            if time.perf_counter() - started >= least:
                break
        watch.sample(state.samples[name], call, count, before)
        reserved = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        # More would not help the next implementation.
        if reserved and reserved > torch.cuda.get_device_properties(self.device).total_memory // 2:
            torch.cuda.empty_cache()

    def _replayed(self, name: str, state: ImplementationState, watch: Stopwatch) -> Figures:
        """Time the call as a CUDA graph, or return why there is none."""
        typical = state.samples[name].timing().median_ms
        if self.device.type == "cuda" and typical > GRAPH_LONGEST_MS:
            return {"graph_reason": f"not taken, since the call is longer than {GRAPH_LONGEST_MS:g} ms"}
        if name == "backward" and state.implementation.consumes:
            return {"graph_reason": "its backward pass runs once for a forward pass"}
        try:
            replay = capture(state.run.passes[name], self.device, wary=state.implementation.kind == PEER)
        except (Unsupported, RuntimeError) as error:
            return {"graph_reason": str(error).splitlines()[0]}
        samples = Samples()
        replay()
        watch.sample(samples, replay, repetitions(self.seconds / 2, typical / 1e3, 5, 100), state.run.restore)
        return {"graph_ms": samples.timing().median_ms}

    def _rows(
        self, case: Case, state: ImplementationState, plain: Errors | None, least: Seconds, copies: Seconds
    ) -> Iterator[OpRow]:
        implementation = state.implementation
        known: Figures = {"overwrites": ",".join(implementation.overwrites)}
        if "" in state.refused:
            known |= state.refused[""]
            yield self._row(case.op, case.workload, implementation.name, implementation.kind, "", **known)
            return
        if state.errors is not None:
            known |= {f"error_{name}": max(errors, default=0.0) for name, errors in vars(state.errors).items()}
            known["error_eager_ratio"] = None if plain is None else state.errors.ratio(plain)
        for name in (n for n in PASSES if n in state.samples or n in state.refused):
            figures = state.refused.get(name)
            if figures is None:
                timing = state.samples[name].timing()
                figures = state.figures[name] | vars(timing)
                if name in least:
                    figures |= {"limit_ms": least[name] * 1e3, "share": least[name] * 1e3 / timing.median_ms}
                if name in copies:
                    figures["copy_ms"] = copies[name] * 1e3
            yield self._row(case.op, case.workload, implementation.name, implementation.kind, name, **known, **figures)

    def _row(
        self, op: Op[..., Any], workload: Workload, implementation: str, kind: str, name: str, **figures: Any
    ) -> OpRow:
        axis, value = workload.axis or (None, None)
        return OpRow(
            op=op.name,
            workload=workload.name,
            axis=axis,
            axis_value=value,
            implementation=implementation,
            kind=kind,
            pass_=name,
            device=self.device.type,
            dtype=machine.dtype_name(self.dtype),
            copy_bytes_per_second=self.limits.bandwidth,
            product_flops_per_second=self.limits.rate,
            **figures | self.where,
        )
