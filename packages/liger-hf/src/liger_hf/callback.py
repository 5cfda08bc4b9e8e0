# SPDX-License-Identifier: Apache-2.0
"""Liger in a Trainer, by one callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from liger_hf.application import Names, apply
from liger_hf.report import Report


class LigerCallback(TrainerCallback):
    """Applies Liger to the model of a Trainer: `Trainer(..., callbacks=[LigerCallback()])`, also of one of TRL's.

    only, exclude, verify  as for `liger_hf.apply`
    undo   restore the model when training has ended
    show   called with the report, on the first process; print by default, None for nothing

    It applies as soon as the Trainer has been made, before accelerate wraps the model; the report is `callback.report`.
    Added later by `trainer.add_callback`, or with model_init=, which creates a new model, it applies when training
    begins.
    """

    def __init__(
        self,
        *,
        only: Names = None,
        exclude: Names = None,
        verify: bool = True,
        undo: bool = False,
        show: Callable[[Report], Any] | None = print,
    ) -> None:
        self.options: dict[str, Any] = {"only": only, "exclude": exclude, "verify": verify}
        self.undo = undo
        self.show = show
        self.report: Report | None = None
        self.model: nn.Module | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **other: Any) -> None:
        self._apply(state, model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **other: Any) -> None:
        self._apply(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **other: Any) -> None:
        if self.undo and self.report is not None:
            self.report.undo()
            self.model = None

    def _apply(self, state: Any, model: Any) -> None:
        inner = getattr(model, "_orig_mod", model)
        if not isinstance(inner, nn.Module) or inner is self.model:
            return
        self.model, self.report = inner, apply(inner, **self.options)
        if self.show is not None and state.is_world_process_zero:
            self.show(self.report)
