# SPDX-License-Identifier: Apache-2.0
"""Record losses, times and memory at the end of each step, without synchronizing the device."""

import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from liger_bench.printing import size
from liger_train import ranks
from liger_train.row import WARM_UP
from liger_train.runs.cpu_memory import CpuMemory
from liger_train.setup import Setup

Show = Callable[[int, str], object]
# A time: seconds on the CPU, an event on a GPU.
Moment = Any


class Interruption:
    """Within this context, the first SIGINT or SIGTERM only sets `requested`; the second one acts as usual.

    Signals that the process ignores stay ignored, such as Ctrl-C in a background job of a script.
    """

    # With several ranks, SIGTERM must end the process: torchrun stops ranks that would wait for a failed one forever.
    SIGNALS = (signal.SIGINT, signal.SIGTERM) if ranks.count() == 1 else (signal.SIGINT,)

    def __init__(self) -> None:
        self.requested = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._request) for number in heeded}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def request(self) -> None:
        """End the run after the current step of all ranks."""
        self.requested = True

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.request()
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class Recorder(TrainerCallback):
    """Records the loss and time of every step, and the peak memory.

    losses  the mean over the tokens of all ranks, for every step
    timed   seconds of every step, except the first two after a start and steps before `restart_timing`
    micro   losses of the micro-batches of the current step
    memory  measures the memory on the CPU, if anything does
    """

    def __init__(self, setup: Setup, device: torch.device, interruption: Interruption, show: Show) -> None:
        self.setup, self.device, self.interruption, self.show = setup, device, interruption, show
        self.memory: CpuMemory | None = None
        self.losses: list[float] = []
        self.timed: list[float] = []
        self.micro: list[Tensor] = []
        self.validation: list[tuple[int, float]] = []
        self.static_bytes: int | None = None
        self.earlier_peaks = (0, 0)
        self.interrupted = False
        self._steps = 0
        self._ended = False
        self._last: Moment = None
        self._pending: deque[tuple[Tensor, Moment, Moment]] = deque()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self._last is None:
            self._last = self._now()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self.memory is not None and self.memory.static is not None:
            self.static_bytes = self.memory.static
        # Micro-batch losses are already normalized by the tokens of the whole batch.
        loss = torch.stack(self.micro).float().sum()
        self.micro.clear()
        step = torch.stack([loss.double(), torch.full_like(loss, self.interruption.requested, dtype=torch.float64)])
        if dist.is_initialized():
            # All ranks stop after the same step if any of them was interrupted.
            dist.all_reduce(step)
            step /= dist.get_world_size()
        # To pinned memory, complete when the event after it is: reading from the device would wait for the next step.
        step = step.to("cpu", non_blocking=True)
        now = self._now()
        self._pending.append((step, self._last, now))
        self._last = now
        if self.device.type == "cuda":
            self.static_bytes = torch.cuda.memory_allocated(self.device)
        # On a GPU, settle only the previous step, which has ended: the next one is enqueued while this one runs.
        ends_at_once = self.interruption.requested and not dist.is_initialized()
        self.settle(1 if self.device.type == "cuda" and not ends_at_once else 0)
        self._show_figures()
        if self.setup.validation and state.global_step == state.max_steps:
            control.should_evaluate = True
        if self.interrupted and state.global_step < state.max_steps:
            control.should_training_stop = True
            control.should_save = True

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        # The next step does not include the time to save.
        self._last = None

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self.validation.append((state.global_step, float(more["metrics"]["eval_loss"])))
        # The next step does not include the time to evaluate.
        self._last = None

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self.settle()
        self._ended = True
        self._show_figures()

    def settle(self, pending: int = 0) -> None:
        """Wait for the steps that are still running, except the last `pending` ones, and record their results."""
        while len(self._pending) > pending:
            step, start, end = self._pending.popleft()
            if self.device.type == "cuda":
                end.synchronize()
            loss, requested = step.tolist()
            self.losses.append(loss)
            self.interrupted |= requested > 0
            self._steps += 1
            if self._steps > WARM_UP:
                self.timed.append(start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start)

    def restart_timing(self) -> None:
        """Discard the times of the steps so far and of the next one, unless the run has ended."""
        if not self._ended:
            self.settle()
            self.timed.clear()
            self._steps = WARM_UP - 1

    def gather(self) -> None:
        """Take over the time of the slowest rank for each step, and the highest memory of any rank."""
        self.settle()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (self.timed, self._peaks(), self.static_bytes))
        self.timed = [max(times) for times in zip(*(timed for timed, _, _ in ranks), strict=True)]
        self.earlier_peaks = (max(peaks[0] or 0 for _, peaks, _ in ranks), max(peaks[1] or 0 for _, peaks, _ in ranks))
        self.static_bytes = max((static for _, _, static in ranks if static is not None), default=None)

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore the progress that an earlier run saved."""
        self.losses, self.timed = list(progress["losses"]), list(progress["timed"])
        self.validation = [(step, loss) for step, loss in progress.get("validation", [])]
        self.earlier_peaks = (progress["peak_bytes"] or 0, progress["peak_reserved_bytes"] or 0)
        self.static_bytes = progress["static_bytes"]

    def progress(self) -> dict[str, Any]:
        """Return the state that a later run needs to continue."""
        self.settle()
        names = ("losses", "validation", "timed", "static_bytes")
        peaks = zip(("peak_bytes", "peak_reserved_bytes"), self._peaks(), strict=True)
        return {name: getattr(self, name) for name in names} | dict(peaks)

    def results(self) -> dict[str, Any]:
        """Return the columns of a Row, as far as they are known."""
        peak, reserved = self._peaks()
        columns: dict[str, Any] = {
            "losses": list(self.losses),
            "validation_loss": self.validation[-1][1] if self.validation else None,
            "validation_losses": [loss for _, loss in self.validation] or None,
            "validation_steps": [step for step, _ in self.validation] or None,
            "peak_bytes": peak,
            "peak_reserved_bytes": reserved,
            "static_bytes": self.static_bytes,
            "interrupted": self.interrupted,
        }
        if self.timed:
            speeds = self._tokens() / np.array(self.timed)
            low, middle, high = (float(value) for value in np.quantile(speeds, (0.2, 0.5, 0.8)))
            columns |= {"tokens_per_second": middle, "low_tokens_per_second": low, "high_tokens_per_second": high}
            columns["step_seconds"] = statistics.median(self.timed)
        return columns

    def _now(self) -> Moment:
        if self.device.type != "cuda":
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def _peaks(self) -> tuple[int | None, int | None]:
        if self.device.type != "cuda":
            return max(self.memory.peak or 0 if self.memory else 0, self.earlier_peaks[0]) or None, None
        peaks = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return max(peaks[0], self.earlier_peaks[0]), max(peaks[1], self.earlier_peaks[1])

    def _tokens(self) -> int:
        """Return the number of tokens in a step, over all ranks."""
        return self.setup.sequences_per_step * self.setup.sequence

    def _show_figures(self) -> None:
        """Show the last step that has ended; on a GPU, later ones are already enqueued."""
        if not self.losses:
            return
        words = [f"loss {self.losses[-1]:.4f}"]
        if self.timed:
            words.append(f"{self._tokens() / self.timed[-1]:,.0f} tokens/s")
        peak = self._peaks()[0]
        if peak:
            words.append(f"peak {size(peak)}")
        self.show(len(self.losses), " · ".join(words))
