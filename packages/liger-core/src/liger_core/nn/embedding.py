# SPDX-License-Identifier: Apache-2.0
"""Embedding with a gradient that is summed in float32."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from liger_core import ops
from liger_core.errors import OptionError
from liger_core.nn.arguments import like
from liger_core.nn.module import check_size


class Embedding(nn.Embedding):
    """torch's module, with the gradient of `embedding`: summed in float32, in the same order in every run.

    num_embeddings  rows of the table
    embedding_dim   columns of the table
    padding_idx     a row that is 0 at first and gets no gradient; None for none
    _weight         the table itself
    _freeze         True if the table gets no gradient
    device, dtype   of the table
    max_norm, norm_type, scale_grad_by_freq, sparse
                    as torch has them by default: others change the weights or what their gradient means, and raise OptionError

    weight  (num_embeddings, embedding_dim)  standard normal at first

    The call takes indices (...) and returns (..., embedding_dim).
    """

    @like(nn.Embedding)
    def __init__(self, *sizes: Any, **options: Any) -> None:
        given = inspect.signature(nn.Embedding).bind(*sizes, **options).arguments
        check_size(self, **{name: given[name] for name in ("num_embeddings", "embedding_dim")})
        super().__init__(*sizes, **options)
        for name, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(self, name) != off:
                raise OptionError(f"Embedding: {name} must be {off}, got {getattr(self, name)!r}; use torch.nn.Embedding")

    def forward(self, index: Tensor) -> Tensor:
        return ops.embedding(index, self.weight, padding_idx=self.padding_idx)
