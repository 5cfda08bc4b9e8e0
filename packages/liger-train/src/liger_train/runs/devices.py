# SPDX-License-Identifier: Apache-2.0
"""The device of a run: its memory limit, and the settings of its allocator."""

import gc
import os

import torch

from liger_bench import machine
from liger_core.errors import DeviceError
from liger_core.private_torch import set_allocator_settings
from liger_train.setup import Setup

# The variables that configure PyTorch's allocator; the first is the name since PyTorch 2.9.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def device_of(setup: Setup) -> torch.device:
    """Return the device of this rank, after setting the memory limit of the setup."""
    device = machine.measurable_device("train", setup.device)
    if device.type == "cpu":
        return device
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.index >= torch.cuda.device_count():
        raise DeviceError(
            f"train: every rank needs a GPU of its own, got {setup.ranks} ranks and {torch.cuda.device_count()} GPUs"
        )
    torch.cuda.set_device(device)
    total = torch.cuda.get_device_properties(device).total_memory
    limit = total if setup.memory_limit is None else setup.memory_limit
    if limit > total:
        raise DeviceError(
            f"train: --memory-limit must be at most the GPU's {total / 2**30:.1f} GiB, got {limit / 2**30:.1f} GiB"
        )
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    _expand_segments(setup)
    return device


def _expand_segments(setup: Setup) -> None:
    """Let segments of the allocator grow, which leaves smaller gaps, unless the environment configures the allocator.

    Memory of captured graphs keeps its addresses, in segments of fixed sizes.
    """
    if setup.compile != "graphs" and not any(name in os.environ for name in ALLOCATOR):
        set_allocator_settings("expandable_segments:True")


def release(device: torch.device) -> None:
    """Free unreferenced and cached memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
