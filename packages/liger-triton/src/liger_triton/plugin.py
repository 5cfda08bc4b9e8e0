# SPDX-License-Identifier: Apache-2.0
"""The plugin that offers the backend `triton`; importing it imports no compiler."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from liger_core import Backend, Op, hookimpl

# In a compiled model Inductor fuses the reference of an elementwise op with its neighbours, which a kernel of ours is a border for.
# An op stands here once a whole model was measured to be faster with it.
HANDED_OVER: tuple[Op[..., Any], ...] = ()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@hookimpl
def liger_backends() -> list[Backend]:
    # The interpreter is for tests: thousands of times slower than PyTorch, so that `auto` never takes it.
    devices, priority = (("cpu", "cuda"), -1) if INTERPRETED else (("cuda",), 100)
    return [Backend("triton", devices, priority, _implementations, _unavailable, HANDED_OVER)]


def _implementations() -> Mapping[Op[..., Any], Callable[..., Any]]:
    from liger_triton.table import TABLE

    return TABLE


def _unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton; Linux only)"
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "no CUDA GPU; set TRITON_INTERPRET=1 before the start to run the kernels in Triton's slow CPU interpreter"
