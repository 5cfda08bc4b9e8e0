# SPDX-License-Identifier: Apache-2.0
"""Imported by every Python that a page of the documentation starts: what the CPU needs and a reader with a GPU does
not."""

import atexit
import os
import sys


def _end() -> None:
    """A rank ends before the interpreter does: a thread of gloo that is still busy then would abort it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and os.environ.get("CUDA_VISIBLE_DEVICES") == "" and "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if hasattr(sys, "last_value") else 0)


atexit.register(_end)

if os.environ.get("DS_ACCELERATOR") == "cpu" and "RANK" in os.environ:
    import deepspeed

    # Else it first compiles collectives of its own, which takes minutes.
    deepspeed.ops.__compatible_ops__.clear()
