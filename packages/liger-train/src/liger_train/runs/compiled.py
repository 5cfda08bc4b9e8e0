# SPDX-License-Identifier: Apache-2.0
"""Run micro-batches with `--compile`; measure compile time, and exclude it from step times."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from liger_train import compiling
from liger_train.row import WARM_UP
from liger_train.runs.graphs import Graphs, Inputs, Step, Tokens
from liger_train.runs.record import Recorder
from liger_train.setup import Setup

EAGER = "--compile: the layers run in eager mode, since the compiler failed: "


class Compiled(TrainerCallback):
    """Runs micro-batches by the value of --compile.

    settled  returns whether --checkpoint auto has settled, because a recorded graph cannot change
    seconds  seconds spent compiling and recording so far; None without --compile
    """

    def __init__(self, setup: Setup, recorder: Recorder, notes: list[str]) -> None:
        self.setup, self.recorder, self.notes = setup, recorder, notes
        self.settled: Callable[[], bool] = lambda: True
        self.seconds: float | None = None if setup.compile == "none" else 0.0
        self._run: Step | None = None
        self._steps = 0
        self._seconds_before = 0.0

    @contextmanager
    def session(self) -> Iterator[None]:
        """Measure the compile time of a training run in this context, and note it on exit."""
        if self.seconds is None:
            yield
            return
        start, counts = compiling.seconds(), compiling.cache_hits_and_misses()
        with compiling.session(self.setup.packing):
            try:
                yield
            finally:
                self.seconds += compiling.seconds() - start
                hits, misses = (now - then for now, then in zip(compiling.cache_hits_and_misses(), counts, strict=True))
                cached = f"{hits} of {hits + misses} graphs" if hits else "none of its graphs"
                took = f"compiling took {self.seconds:.1f} s"
                self.notes.append(f"--compile {self.setup.compile}: {took}; {cached} came from the cache.")

    def step(self, step: Step, model: nn.Module, inputs: Inputs, tokens: Tokens) -> Tensor:
        """Run a micro-batch, by `step` or by a graph of it; return the loss."""
        if self._run is not None:
            return self._run(inputs, tokens)
        run = self._run = self._runner(step, model)
        if self.seconds is None:
            return run(inputs, tokens)
        return compiling.or_eagerly(lambda: run(inputs, tokens), model, lambda why: self.notes.append(EAGER + why))

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._steps += 1
        self._seconds_before = compiling.seconds() if self.seconds is not None else 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.seconds is not None and self._steps > WARM_UP and compiling.seconds() > self._seconds_before:
            self.recorder.restart_timing()

    def _runner(self, step: Step, model: nn.Module) -> Step:
        if self.setup.compile != "graphs":
            return step
        return Graphs(
            step, model, lambda: self._steps >= WARM_UP and self.settled(), self.notes.append, self._recording
        )

    @contextmanager
    def _recording(self) -> Iterator[None]:
        assert self.seconds is not None
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.recorder.restart_timing()
