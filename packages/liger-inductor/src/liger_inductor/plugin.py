# SPDX-License-Identifier: Apache-2.0
"""The plugin that offers the backend `inductor`; importing it imports no compiler."""

import os
import shutil

from liger_core import Backend, hookimpl
from liger_core.backend import Implementations

# Those that Inductor generates code for; ROCm calls its devices cuda, too.
DEVICES = ("cpu", "cuda", "xpu", "mps")
COMPILERS = ("g++", "clang++", "cl")


@hookimpl
def liger_backends() -> list[Backend]:
    # Not automatic: an op compiles for 2 to 11 seconds at its first call, and again for every dtype and pattern of
    # gradients. It then saves about a millisecond a call on a CPU, so that a short program, such as a test, would only
    # become slower.
    return [Backend("inductor", DEVICES, 50, _implementations, _unavailable, automatic=False)]


def _implementations() -> Implementations:
    from liger_inductor.table import TABLE

    return TABLE


def _unavailable() -> str | None:
    compiler = os.environ.get("CXX")
    if any(shutil.which(name) for name in ((compiler,) if compiler else COMPILERS)):
        return None
    missing = f"CXX={compiler} is not a program" if compiler else f"none of {', '.join(COMPILERS)} is installed"
    return f"torch.compile needs a C++ compiler, and {missing}"
