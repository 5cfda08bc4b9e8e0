# SPDX-License-Identifier: Apache-2.0
"""The trip of one call: the files that a reader of both passes opens, with Triton's kernels in the interpreter."""

import functools
import json
import os
import subprocess
import sys

import pytest

# Prints, for each op, the files of the packages whose functions run.
TRACE = """
import json, sys, threading, torch
from liger_core import linear_cross_entropy, rms_norm, use

def leaf(*shape):
    return torch.randn(shape, requires_grad=True)

calls = {
    "linear_cross_entropy": lambda: linear_cross_entropy(leaf(8, 16), leaf(64, 16), torch.arange(8)).backward(),
    "rms_norm": lambda: rms_norm(leaf(4, 32), leaf(32)).sum().backward(),
}
entered = {name: set() for name in calls}

def trace(frame, event, argument):
    path = frame.f_code.co_filename
    if "/liger_" in path and not path.endswith("/interpreter.py"):
        entered[name].add(path.rpartition("/liger_")[2])

with use("triton"):
    for name, call in calls.items():
        call()
        sys.settrace(trace)
        threading.settrace(trace)
        call()
        sys.settrace(None)
        threading.settrace(None)
print(json.dumps({name: sorted(files) for name, files in entered.items()}))
"""


@functools.cache
def trips() -> dict[str, list[str]]:
    """Return the files that a second call of each op enters; the first one settles the selection."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRACE], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("op", "most"), [("linear_cross_entropy", 12), ("rms_norm", 8)])
def test_a_reader_of_a_call_opens_few_files(op: str, most: int) -> None:
    pytest.importorskip("triton")
    files = trips()[op]
    assert "triton/launch.py" in files
    assert len(files) <= most, files
