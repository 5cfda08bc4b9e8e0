# SPDX-License-Identifier: Apache-2.0
"""The plugin that offers the backend `triton`; importing it imports no compiler."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version

from liger_core import Backend, Op, add_rms_norm, geglu, hookimpl, layer_norm, rms_norm, rope, swiglu
from liger_core.versions import warn_if_untested

# In a compiled model the host starts a kernel that Inductor made in a few microseconds, and a custom op in tens of them, which shows where the
# device waits for the host. A Llama of 1B on one H200: with 1 × 1024 tokens all custom ops give 0.77 of what Hugging Face's compiled model
# does; with 8 × 1024 they are 1 to 2 % faster than the references that Inductor fuses. So tensors of 2048 tokens × 2048 columns and less are
# handed over; the gated units read tensors four times as wide.
SMALL = 2048 * 2048
HANDED_OVER: dict[Op[..., Any], int] = {
    add_rms_norm: SMALL,
    layer_norm: SMALL,
    rms_norm: SMALL,
    rope: SMALL,
    geglu: 4 * SMALL,
    swiglu: 4 * SMALL,
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@hookimpl
def liger_backends() -> list[Backend]:
    # The interpreter is for tests: thousands of times slower than PyTorch, so that `auto` never takes it.
    devices, priority = (("cpu", "cuda"), -1) if INTERPRETED else (("cuda",), 100)
    return [Backend("triton", devices, priority, _implementations, _unavailable, HANDED_OVER, supports_fake_tensors=True)]


def _implementations() -> Mapping[Op[..., Any], Callable[..., Any]]:
    from liger_triton.table import TABLE

    warn_if_untested("liger-triton")
    return TABLE


def _unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton; Linux only)"
    if INTERPRETED:
        return _interpreter_problem(metadata.version("triton"), metadata.version("numpy"))
    if torch.cuda.is_available():
        return None
    return "no CUDA GPU; set TRITON_INTERPRET=1 before the start to run the kernels in Triton's slow CPU interpreter"


def _interpreter_problem(triton: str, numpy: str) -> str | None:
    if Version(triton) < Version("3.7") and Version(numpy) >= Version("2.4"):
        return f"the interpreter of Triton {triton} cannot run loops with numpy {numpy}; pip install 'numpy<2.4', or a newer Triton"
    return None
