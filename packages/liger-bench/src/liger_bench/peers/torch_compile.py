# SPDX-License-Identifier: Apache-2.0
"""torch.compile of the functions of `eager`, for the shapes of each workload.

Its backward pass overwrites the tensors that forward saved, so it can run only once.
"""

from collections.abc import Callable
from typing import Any

import torch

from liger_bench.peers import Peer
from liger_bench.peers.eager import calls

BACKEND = "inductor"


def peers() -> list[Peer]:
    return [Peer("compile", calls(), consumes=True, prepared=compiled)]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Otherwise the graphs of earlier workloads count as recompilations, which are limited.
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, fullgraph=True, backend=BACKEND)
