# SPDX-License-Identifier: Apache-2.0
"""The description of its processes that a training step receives, and the type of a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """The processes of one run of a step.

    rank    the rank of this process
    ranks   the number of processes; a step of 1 process computes the result that the others are compared with
    dtype   the dtype of the model's parameters: float64 for 1 process, except when it measures round-off, else float32
    device  the device of this process: a GPU of its own if the ranks run on GPUs, else the CPU
    folder  a folder that all processes of both runs share. The run of 1 process comes first, and can save a checkpoint
            there for the others
    """

    rank: int
    ranks: int
    dtype: torch.dtype
    folder: Path
    device: torch.device = CPU

    @property
    def alone(self) -> bool:
        """Whether this is the one process that the others are compared with."""
        return self.ranks == 1


# Called in every process; returns the loss of the whole batch, and the gradient of each parameter by name, in the order
# of the forward pass. A DTensor stands for its full_tensor(); any other tensor must be the same on all ranks.
Step = Callable[[World], tuple[Tensor | float, Mapping[str, Tensor | None]]]
