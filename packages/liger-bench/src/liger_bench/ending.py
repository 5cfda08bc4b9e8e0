# SPDX-License-Identifier: Apache-2.0
"""How a process ends that was one of several."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def end(code: int = 0) -> NoReturn:
    """End this process at once, with all that it printed.

    A process group outlives destroy_process_group, since caches of DTensor and DeepSpeed hold it, and with it the
    threads of gloo. One of these that lets go of its last tensors only while the interpreter ends, as on a busy
    machine, aborts the process: "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
