# SPDX-License-Identifier: Apache-2.0
"""A small model whose layers mix tokens by a gated delta rule and by a convolution, with bugs of packing to plant."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY = 8, 50


class GatedDeltaNet(nn.Module):
    """S ← decay · S + beta · k (v − k S) ᵀ for each token, which reads q S; the state is 0 where a document begins."""

    def __init__(self, resets: bool = True) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2)
        self.resets = resets

    def forward(self, x: Tensor, starts: set[int]) -> Tensor:
        q, k, v = self.in_proj(x[0]).chunk(3, -1)
        k = F.normalize(k, dim=-1)
        decay, beta = self.gate(x[0]).sigmoid().unbind(-1)
        state, rows = x.new_zeros(WIDTH, WIDTH), []
        for t in range(x.shape[1]):
            if self.resets and t in starts:
                state = torch.zeros_like(state)
            state = decay[t] * state
            state = state + beta[t] * torch.outer(k[t], v[t] - k[t] @ state)
            rows.append(q[t] @ state)
        return torch.stack(rows)[None]


class ShortConv(nn.Module):
    """A causal convolution over three tokens, of each document alone."""

    def __init__(self, resets: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.resets = resets

    def forward(self, x: Tensor, starts: set[int]) -> Tensor:
        cuts = sorted(starts | {x.shape[1]}) if self.resets else [0, x.shape[1]]
        sizes = [stop - start for start, stop in pairwise(cuts)]
        return torch.cat([self.conv(F.pad(each.mT, (2, 0))).mT for each in x.split(sizes, 1)], 1)


class Backward(nn.Module):
    """A bug in the backward pass alone: gradients reach the token before."""

    def forward(self, x: Tensor, starts: set[int]) -> Tensor:
        return (before := x.roll(1, 1)) - before.detach()


class Layer(nn.Module):
    def __init__(self, name: str, mixer: nn.Module) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, mixer)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())

    def forward(self, x: Tensor, starts: set[int]) -> Tensor:
        x = x + getattr(self, self.name)(x, starts)
        return x + self.mlp(x)


class Hybrid(nn.Module):
    """The model; `cu_seq_lens_q` separates documents."""

    def __init__(self, *layers: tuple[str, nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(*layer) for layer in layers])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(
        self, input_ids: Tensor, labels: Tensor, cu_seq_lens_q: Tensor | None = None, **others: Any
    ) -> SimpleNamespace:
        starts = {0} if cu_seq_lens_q is None else set(cu_seq_lens_q.tolist())
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, starts)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x)[0, :-1], labels[0, 1:]))
