# SPDX-License-Identifier: Apache-2.0
"""What a training step gets to know about its processes, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class World:
    """The processes of one run of a step.

    rank    of this process
    ranks   how many processes there are; with 1 the step computes what the others are compared with
    dtype   of the model's parameters: float64 in the one process, else float32; also float32 where the one process measures round-off
    folder  the same for all processes of both runs. The one process runs first, so it can leave a checkpoint here
    """

    rank: int
    ranks: int
    dtype: torch.dtype
    folder: Path

    @property
    def alone(self) -> bool:
        """Whether this is the one process that the others are compared with."""
        return self.ranks == 1


# Called in every process; returns the loss of the whole batch, and the gradient of each parameter by name, in the order of the forward pass.
# A DTensor counts as what its full_tensor() is; any other tensor must be the same on all ranks.
Step = Callable[[World], tuple[Tensor | float, Mapping[str, Tensor | None]]]
