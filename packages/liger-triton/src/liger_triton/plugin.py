# SPDX-License-Identifier: Apache-2.0
"""The plugin that offers the backend `triton`; importing it imports no compiler."""

import importlib.util
import os
from importlib import metadata

import torch
from packaging.version import Version

from liger_core import Backend, hookimpl
from liger_core.backend import Implementations
from liger_core.versions import warn_if_untested

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@hookimpl
def liger_backends() -> list[Backend]:
    # `auto` never selects the interpreter, which is thousands of times slower than PyTorch: it is for tests.
    devices = ("cpu", "cuda") if INTERPRETED else ("cuda",)
    return [
        Backend(
            "triton",
            devices,
            100,
            _implementations,
            _unavailable,
            automatic=not INTERPRETED,
            supports_fake_tensors=True,
        )
    ]


def _implementations() -> Implementations:
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
        return (
            f"the interpreter of Triton {triton} cannot run loops with numpy {numpy}; pip install 'numpy<2.4', or a "
            "newer Triton"
        )
    return None
