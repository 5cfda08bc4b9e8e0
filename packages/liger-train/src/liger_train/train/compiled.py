# SPDX-License-Identifier: Apache-2.0
"""Run the steps of a run with `--compile`, measure compile time, and exclude it from step times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from liger_train import compiling
from liger_train.row import WARM_UP
from liger_train.setup import Setup
from liger_train.train.graphs import Graphs, Inputs, Step, Tokens
from liger_train.train.record import Recorder


class Compiled(TrainerCallback):
    """Run the micro-batches of a run as its --compile says.

    settled  returns whether --checkpoint auto has settled, because a graph cannot change after it was recorded
    seconds  spent compiling and recording so far; None without --compile
    """

    def __init__(self, setup: Setup, recorder: Recorder, notes: list[str]) -> None:
        self.setup, self.recorder, self.notes = setup, recorder, notes
        self.settled: Callable[[], bool] = lambda: True
        self.seconds: float | None = None if setup.compile == "none" else 0.0
        self._run: Step | None = None
        self._begun = 0
        self._before = 0.0

    @contextmanager
    def session(self) -> Iterator[None]:
        """Train within this context. It measures compile time, and notes it on exit."""
        if self.seconds is None:
            yield
            return
        before, (hits, misses) = compiling.seconds(), compiling.from_cache()
        with compiling.session(self.setup.packing):
            try:
                yield
            finally:
                self.seconds += compiling.seconds() - before
                now = compiling.from_cache()
                self.notes.append(_sentence(self.setup, self.seconds, now[0] - hits, now[1] - misses))

    def step(self, step: Step, model: nn.Module, inputs: Inputs, tokens: Tokens) -> Tensor:
        """Run a micro-batch by `step` or by a graph of it, and return the loss."""
        if self._run is None:
            self._run = self._runner(step, model)
        return self._run(inputs, tokens)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._begun += 1
        self._before = compiling.seconds() if self.seconds is not None else 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.seconds is not None and self._begun > WARM_UP and compiling.seconds() > self._before:
            self.recorder.restart_timing()

    def _runner(self, step: Step, model: nn.Module) -> Step:
        if self.seconds is None:
            return step
        first = compiling.FirstCall(model, self.notes.append)
        if self.setup.compile != "graphs":
            return lambda inputs, tokens: first(lambda: step(inputs, tokens))
        graphs = Graphs(
            step, model, lambda: self._begun >= WARM_UP and self.settled(), self.notes.append, self._recording
        )
        return lambda inputs, tokens: first(lambda: graphs(inputs, tokens))

    @contextmanager
    def _recording(self) -> Iterator[None]:
        assert self.seconds is not None
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun
        self.recorder.restart_timing()


def _sentence(setup: Setup, seconds: float, hits: int, misses: int) -> str:
    where = f"{hits} of {hits + misses} graphs" if hits else "none of its graphs"
    return f"--compile {setup.compile}: compiling took {seconds:.1f} s; {where} came from the cache."
