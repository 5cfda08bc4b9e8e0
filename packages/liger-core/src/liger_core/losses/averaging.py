# SPDX-License-Identifier: Apache-2.0
"""The averaging rules by which losses reduce per-token terms to one number."""

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError, ShapeError
from liger_core.losses.tokens import masked

RULES = ("token", "sequence", "group", "constant", "none")


@dataclass(frozen=True, eq=False)
class Averaging:
    """The mean of x (B, T) over the tokens that count, |oᵢ| of them in sequence i.

        token      Σᵢ Σₜ xᵢₜ / Σᵢ |oᵢ|                     every token weighs the same (DAPO as implemented)
        sequence   1/B · Σᵢ Σₜ xᵢₜ / |oᵢ|                  every sequence weighs the same (GRPO)
        group      mean over groups of the token mean      a group is group_size consecutive sequences (DAPO as printed)
        constant   1/B · Σᵢ Σₜ xᵢₜ / length                long sequences weigh more (Dr. GRPO; length 1: sums)
        none       xᵢₜ                                     not reduced: loss and metrics of each token (B, T)

    group_size  sequences in a group, for "group"
    length      for "constant": the greatest possible length of a sequence, in tokens
    count       divides the outer sum instead of this batch's number of tokens ("token"), sequences ("sequence",
                "constant") or groups ("group"): a number, or a tensor on the device. With the number of the whole
                optimizer step, the losses of micro-batches and ranks add up to that of the undivided batch. DDP and
                FSDP average gradients over ranks, so pass that number divided by the number of ranks

    A sequence without a counted token adds 0 and is part of B. Without any counted token the result is 0, with zero
    gradients.
    """

    over: str = "token"
    group_size: int | None = None
    length: int | None = None
    count: Tensor | float | None = None

    def __post_init__(self) -> None:
        name = "losses.Averaging"
        checks.choice(name, "over", self.over, RULES)
        for option, value, rule in (("group_size", self.group_size, "group"), ("length", self.length, "constant")):
            if (value is not None) != (self.over == rule):
                got = f"got {value!r} with over={self.over!r}"
                checks.fail(OptionError, name, f"{option} must be given with over={rule!r}, and only there, {got}")
            if value is not None:
                checks.integer(name, option, value)
                checks.positive(name, option, value)
        if self.over == "none" and self.count is not None:
            checks.fail(OptionError, name, f"count must be None with over='none', got {self.count!r}")
        if isinstance(self.count, Tensor):
            if self.count.dim():
                got = f"a tensor of shape {checks.shape(self.count)}"
                checks.fail(ShapeError, name, f"count must be one number, got {got}")
        elif self.count is not None:
            checks.not_negative(name, "count", self.count)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        x = masked(x, mask)
        if self.over == "none":
            return x
        if self.over == "token":
            return x.sum() / self._count(mask.sum().clamp(min=1))
        if self.over == "group":
            x, mask = self._groups(x), self._groups(mask)
        means = x.sum(-1) / (self.length or mask.sum(-1).clamp(min=1))
        return means.sum() / self._count(max(means.shape[0], 1))

    def metric(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over the counted tokens, or the values of all tokens if the loss is not reduced."""
        return masked(x, mask) if self.over == "none" else mean_of(x, mask)

    def _count(self, default: Tensor | int) -> Tensor | float:
        if self.count is None:
            return default
        # The mean of nothing is 0, not NaN.
        return torch.where(self.count == 0, 1, self.count) if isinstance(self.count, Tensor) else self.count or 1

    def _groups(self, x: Tensor) -> Tensor:
        (sequences, tokens), size = x.shape, self.group_size or 1
        if sequences % size:
            sentence = f"sequences must come in groups of group_size={size}, got {sequences} sequences"
            checks.fail(ShapeError, "losses.Averaging", sentence)
        return x.reshape(sequences // size, size * tokens)


TOKEN = Averaging("token")
SEQUENCE = Averaging("sequence")


def mean_of(x: Tensor, counted: Tensor) -> Tensor:
    """Return the mean over counted values, or 0 if there are none."""
    return torch.where(counted, x, 0.0).sum() / counted.sum().clamp(min=1)
