# SPDX-License-Identifier: Apache-2.0
"""Head: inputs from which a loss computes log-probabilities itself, without storing the logits."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.ops.linear_log_prob import linear_log_prob


class Head:
    """The inputs of the LM head and its targets, instead of log-probabilities.

    hidden     (sequences, tokens, H)
    weight     (V, H)
    target     (sequences, tokens)   the token after each position, ignore_index for prompt and padding
    options    those of linear_log_prob except return_statistics: bias, temperature, softcap, logit_scale, ignore_index,
               return_entropy, budget, …

    Raises OptionError for return_statistics=True.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> None:
        if options.get("return_statistics"):
            sentence = "return_statistics must be False, since losses take log-probabilities and entropies, got True"
            checks.fail(OptionError, "losses.Head", f"{sentence}; call linear_log_prob for the rest")
        self.hidden, self.weight, self.target, self.options = hidden, weight, target, options

    @property
    def mask(self) -> Tensor:
        """Return a mask (sequences, tokens) of the tokens that count: those whose target is not ignore_index."""
        return self.target != self._ignore_index

    def log_prob(self, mask: Tensor | None = None, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of every target, and the entropy of its distribution if requested.

        Tokens outside `mask` get 0 and cost nothing.
        """
        target = self.target if mask is None else torch.where(mask, self.target, self._ignore_index)
        options = {**self.options, "return_entropy": entropy or self.options.get("return_entropy", False)}
        result = linear_log_prob(self.hidden, self.weight, target, **options)
        return result if options["return_entropy"] else (result, None)

    @property
    def _ignore_index(self) -> int:
        return int(self.options.get("ignore_index", -100))


LogProbs: TypeAlias = Tensor | Head
# linear_log_prob(…, return_entropy=True) returns this pair.
LogProbsAndEntropy: TypeAlias = LogProbs | tuple[Tensor, Tensor]
