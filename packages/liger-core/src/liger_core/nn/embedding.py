# SPDX-License-Identifier: Apache-2.0
"""The embedding."""

from torch import Tensor, nn

from liger_core import ops
from liger_core.errors import OptionError


class Embedding(nn.Embedding):
    """Look up rows of a table, and sum its gradient in float32, in the same order in every run; see `embedding`.

    The constructor is that of `torch.nn.Embedding`. The call raises OptionError if max_norm, scale_grad_by_freq or
    sparse is not the default.

    index    (...)                             any integer dtype
    returns  (..., embedding_dim)              dtype of weight
    weight   (num_embeddings, embedding_dim)   standard normal at first; the row padding_idx is 0

    Example:

        >>> embedding = nn.Embedding(100, 64, padding_idx=0)
        >>> embedding(torch.tensor([[3, 7, 0]])).shape
        torch.Size([1, 3, 64])
    """

    def forward(self, index: Tensor) -> Tensor:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            options = f"max_norm={self.max_norm}, scale_grad_by_freq={self.scale_grad_by_freq}, sparse={self.sparse}"
            raise OptionError(f"Embedding: options must have their defaults, got {options}; use torch.nn.Embedding")
        return ops.embedding(index, self.weight, padding_idx=self.padding_idx)
