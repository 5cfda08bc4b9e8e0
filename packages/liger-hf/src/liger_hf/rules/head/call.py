# SPDX-License-Identifier: Apache-2.0
"""The state of one call of a head, which all logits derived from it share, and the checks that they are still valid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from liger_core.private_torch import forward_mode_enabled
from liger_hf.errors import LogitsError
from liger_hf.repeated import RandomState, Settings, draws, settings_of
from liger_hf.rules.head.projection import LAZY
from liger_hf.rules.head.weights import HeadWeights, reloads_weights

if TYPE_CHECKING:
    from liger_hf.rules.head.lazy_logits import LazyLogits


class HeadCall:
    """The state of one call of a head.

    used      whether a loss was computed from the logits, so the logits themselves are not needed
    forward   the model's forward that called the head; None in compiled code
    closed    whether the model has returned the logits
    changed   whether the logits were written to
    weights   the weights of the head; None if only its hooks can load them
    version   the version counter of the head's input; None in compiled code
    settings  the settings of the head; None for a linear layer, and in compiled code
    numbers   the random state when logits or a loss were first computed, if the head draws random numbers
    repeats   whether the logits were missing within a checkpoint, so its recomputation must not find them either
    in_a_function  whether a custom autograd function called the head, and so differentiates the logits itself
    """

    def __init__(self, hidden: Tensor, head: nn.Module, autocast: tuple[str, torch.dtype] | None) -> None:
        self.used = False
        self.forward = None if torch.compiler.is_compiling() else LAZY.forward
        self.closed = False
        self.changed = False
        self.weights = None if reloads_weights(head) else HeadWeights(head)
        self.version = None if torch.compiler.is_compiling() or hidden.is_inference() else hidden._version
        self.autocast = autocast
        self.settings = settings_of(head)
        self.numbers: RandomState | None = None
        self.repeats = False
        self.in_a_function = not torch.compiler.is_compiling() and in_a_function()

    @property
    def open(self) -> bool:
        """Whether the model's forward still runs."""
        return not self.closed and (self.forward is None or self.forward.runs)

    def again(self, head: nn.Module, device: torch.device) -> AbstractContextManager[None]:
        """Restore the head's settings and random numbers within this context.

        The first computation draws random numbers, as the head would have; later ones draw the same numbers.
        """
        return nullcontext() if self.settings is None else self._again(self.settings, head, device)

    @contextmanager
    def _again(self, settings: Settings, head: nn.Module, device: torch.device) -> Iterator[None]:
        with settings.again():
            drawn = self.numbers
            if drawn is None and draws(head):
                self.numbers = RandomState(device)
            with nullcontext() if drawn is None else drawn.again():
                yield


def in_a_function() -> bool:
    """Return whether a custom autograd function runs its forward pass.

    There, torch disables forward-mode AD, which it otherwise does only in inference mode.
    """
    return not (forward_mode_enabled() or torch.is_inference_mode_enabled())


def not_in_a_function(logits: LazyLogits) -> None:
    """Raise LogitsError within a custom autograd function, which would give these logits no gradient."""
    if torch.compiler.is_compiling() or logits.call.in_a_function or not in_a_function():
        return
    if logits.requires_grad and not logits.constant:
        raise LogitsError(
            "logits: a custom autograd function, or reentrant checkpointing, must be given a tensor, since it gives no "
            "gradient to anything else, got logits that are computed on demand; call the model with keep_logits=True"
        )


def still_valid(logits: LazyLogits) -> None:
    """Raise LogitsError if the logits would differ from those of the forward pass."""
    if logits.view_of_another and logits.call.changed:
        raise LogitsError(
            "logits: a slice must be used before the logits that it was taken from are written to, they were changed "
            "in place; write to a copy made with logits.clone()"
        )
    if torch.compiler.is_compiling():
        return
    if logits.call.version is not None and logits.call.version != logits.hidden._version:
        raise LogitsError(
            "logits: they must be read before the hidden states that the output head was called with are changed in "
            "place; read outputs.logits first, or change a copy of the hidden states"
        )
    if not (logits.call.open or logits.call.weights is None):
        logits.call.weights.check(logits.head)
