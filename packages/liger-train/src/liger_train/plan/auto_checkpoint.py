# SPDX-License-Identifier: Apache-2.0
"""Plan what `--checkpoint auto` ends with: the callback of the run decides, by the memory of steps on fake tensors."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

from liger_bench.printing import size
from liger_train.auto_checkpoint import GPU, AutoCheckpoint, bytes_of_inputs, splits
from liger_train.plan.ledger import Ledger
from liger_train.plan.optimizers import OPTIMIZERS, weights_of
from liger_train.plan.sharding import optimizer_memory, sharding_of
from liger_train.plan.step import (
    AUTO,
    CPU,
    NEUTRAL,
    Prediction,
    as_option_error,
    fake_model,
    ledger_of_a_step,
    prediction_of,
    step_of,
)

START = "--checkpoint auto starts with {}. Peaks of other techniques are those of their start, too."
# Only what the callback asks for: the device, and whether the optimizer has its state.
ARGUMENTS: Any = SimpleNamespace(device=CPU)
OPTIMIZER: Any = SimpleNamespace(state={"step": 1})


class PlannedMemory(GPU):
    """The memory of a step on fake tensors, instead of a GPU's. The computation hides copies to the host.

    limit   the memory that the run may use
    state   bytes of the optimizer state
    ledger  of the current step
    most    the prediction with the highest peak so far
    """

    def __init__(self, limit: int, state: int, most: Prediction) -> None:
        super().__init__(limit)
        self.state, self.most, self.ledger = state, most, Ledger()

    def limit(self) -> int:
        return self.memory_limit or 0

    def allocated(self) -> int:
        return self.state + sum(size for _, size, _ in self.ledger.events)

    def peak(self) -> int:
        return self.most.peak_bytes

    def retries(self) -> int:
        return 0

    def tidy(self) -> None:
        """Do nothing: no blocks are cached."""

    def mark(self) -> float:
        return 0.0

    def seconds(self, start: Any, end: Any) -> float:
        return 0.0

    def copies(self, size: int) -> float:
        return 0.0


class _Measured(Ledger):
    """A ledger that a PlannedMemory reads from the start of the step on."""

    memory: PlannedMemory

    def begin(self) -> None:
        super().begin()
        self.memory.ledger = self


def predict_end(start: Prediction, limit: int | None) -> Prediction:
    """Predict a run whose start is predicted, once --checkpoint auto has used the memory within the limit.

    Without a limit, with another --checkpoint, and if the start does not fit, this is the start.
    """
    setup = start.setup
    if setup.checkpoint != "auto" or limit is None or not start.fits(limit):
        return start
    planned = replace(setup, **NEUTRAL)
    notes: list[str] = []
    with as_option_error(setup):
        model, mode, _ = fake_model(planned)
        sharding = sharding_of(planned, model)
        state, _ = optimizer_memory(setup, OPTIMIZERS[setup.optimizer], weights_of(model))
        memory = PlannedMemory(limit, state, replace(start, peak_bytes=0))
        callback = AutoCheckpoint(memory, notes.append, splits(setup), bytes_of_inputs(setup))
        callback.on_train_begin(ARGUMENTS, None, None, model=model)
        # The first step allocates the optimizer state, and is not measured.
        callback.on_step_end(ARGUMENTS, _state(1), None, optimizer=OPTIMIZER)
        if setup.shard == "zero3":
            ledger_of_a_step(planned, model, sharding, mode)
        for step in count(2):
            parts = callback.parts
            micro_batch = replace(planned, batch=-(-setup.batch // parts), accumulation=setup.accumulation * parts)
            model.zero_grad(set_to_none=True)
            callback.on_step_begin(ARGUMENTS, _state(step), None)
            ledger = ledger_of_a_step(micro_batch, model, sharding, mode, _Measured, memory=memory)
            prediction = prediction_of(setup, step_of(planned, model, ledger, notes=()))
            memory.most = max(memory.most, prediction, key=lambda each: each.peak_bytes)
            callback.on_step_end(ARGUMENTS, _state(step), None, optimizer=OPTIMIZER)
            if callback.policy is None or callback.settled:
                break
    others = (note for note in start.notes if note != AUTO)
    return replace(memory.most, notes=(*others, START.format(size(start.peak_bytes)), *notes))


def _state(step: int) -> Any:
    return SimpleNamespace(global_step=step)
