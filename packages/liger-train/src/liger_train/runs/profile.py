# SPDX-License-Identifier: Apache-2.0
"""`liger train --profile`: a trace of a few steps by PyTorch's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from transformers import TrainerCallback

from liger_train.runs.snapshot import name_of
from liger_train.setup import Setup

FOLDER = "profiles"
# Numbers of steps: to skip, to warm up the profiler, and to record.
WAIT, WARM_UP, ACTIVE = 1, 1, 2


class Profile(TrainerCallback):
    """A callback and context manager that traces operators, kernels, shapes and memory to FOLDER/profiles/<run>.

    Open the folder in TensorBoard (torch-tb-profiler), or its .pt.trace.json.gz in https://ui.perfetto.dev.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.path = folder / FOLDER / name_of(setup)
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if setup.device == "cuda" else [])
        self._profile = profile(
            activities=kinds,
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=tensorboard_trace_handler(str(self.path), use_gzip=True),
            record_shapes=True,
            profile_memory=True,
        )

    def __enter__(self) -> Profile:
        self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the trace, even if the run ended early."""
        self._profile.stop()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._profile.step()
