# SPDX-License-Identifier: Apache-2.0
"""Embedding with a gradient that is summed in float32."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from liger_core import ops
from liger_core.errors import OptionError


class Embedding(nn.Embedding):
    """torch's module, with the gradient of `embedding`: summed in float32, in the same order in every run.

    Raises OptionError for max_norm, scale_grad_by_freq and sparse, which change the weights or what their gradient means.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        for name, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(self, name) != off:
                raise OptionError(f"Embedding: {name} must be {off}, got {getattr(self, name)!r}; use torch.nn.Embedding")

    def forward(self, index: Tensor) -> Tensor:
        return ops.embedding(index, self.weight, padding_idx=self.padding_idx)
