# SPDX-License-Identifier: Apache-2.0
"""`liger train --profile`: a trace of a few steps by PyTorch's profiler, and the time of their kernels by kind."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from transformers import TrainerCallback

from liger_bench import machine
from liger_train.runs.snapshot import name_of
from liger_train.setup import Setup

FOLDER = "profiles"
# Numbers of steps: to skip, to warm up the profiler, and to record.
WAIT, WARM_UP, ACTIVE = 1, 1, 2
# A kind of kernel → a pattern of its names; the first one that matches counts. Triton kernels have plain identifiers.
KINDS = {
    "attention": "flash|fmha|sdpa|cudnn|attention",
    "matmuls": "nvjet|gemm|cutlass|cublas",
    "communication": "nccl",
    "4 bits": "dequantize",
    "Inductor": "^triton_",
    "fused ops": r"^\w+$",
    "PyTorch": "",
}


class Profile(TrainerCallback):
    """A callback and context manager that traces operators, kernels, shapes and memory to FOLDER/profiles/<run>.

    Open the folder in TensorBoard (torch-tb-profiler), or its .pt.trace.json.gz in https://ui.perfetto.dev. On a GPU,
    FOLDER/profiles/<run>.json has the milliseconds of a step's kernels by kind.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.path = setup, folder / FOLDER / name_of(setup)
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if setup.device == "cuda" else [])
        self._profile = profile(
            activities=kinds,
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )

    def __enter__(self) -> Self:
        self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the trace, even if the run ended early."""
        self._profile.stop()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._profile.step()

    def _write(self, recorded: profile) -> None:
        tensorboard_trace_handler(str(self.path), use_gzip=True)(recorded)
        if self.setup.device == "cuda":
            times = kernel_times(
                (event.name, event.time_range.elapsed_us() / 1e3 / ACTIVE)
                for event in recorded.events() or ()
                if event.device_type == DeviceType.CUDA and not event.is_user_annotation
            )
            record = {"setup": asdict(self.setup), "milliseconds": times, **machine.describe(torch.device("cuda"))}
            Path(f"{self.path}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


def kernel_times(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of the times of kernels, given with their names, by kind, the longest first."""
    times: defaultdict[str, float] = defaultdict(float)
    for name, time in kernels:
        times[next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))] += time
    return dict(sorted(times.items(), key=lambda item: item[1], reverse=True))
