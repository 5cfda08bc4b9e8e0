# SPDX-License-Identifier: Apache-2.0
"""The plugin that offers the backend `triton`; importing it imports no compiler."""

from __future__ import annotations

import importlib.util
import os

import torch

from liger_core import Backend, hookimpl
from liger_core.backend import Implementations

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@hookimpl
def liger_backends() -> list[Backend]:
    # The interpreter is for tests: thousands of times slower than PyTorch, so that `auto` never takes it.
    devices = ("cpu", "cuda") if INTERPRETED else ("cuda",)
    return [Backend("triton", devices, 100, _implementations, _unavailable, automatic=not INTERPRETED, supports_fake_tensors=True)]


def _implementations() -> Implementations:
    from liger_triton.table import TABLE

    return TABLE


def _unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton; Linux only)"
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "no CUDA GPU; set TRITON_INTERPRET=1 before the start to run the kernels in Triton's slow CPU interpreter"
