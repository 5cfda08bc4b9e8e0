# SPDX-License-Identifier: Apache-2.0
"""Apply Liger in a Trainer by one callback."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from liger_hf.application import Names, apply
from liger_hf.report import Report
from liger_hf.without_gradient import GradientCheck


class LigerCallback(GradientCheck):
    """Apply Liger to the model of a Trainer, also of TRL's: `Trainer(..., callbacks=[LigerCallback()])`.

    only, exclude, verify  as for `liger_hf.apply`
    undo   restore the model when training has ended
    show   called with the report, on the first process; print by default, None for nothing

    It applies when the Trainer is created, before accelerate wraps the model; the report is `callback.report`. If it is
    added later by `trainer.add_callback`, or if model_init= creates a new model, it applies when training begins.

    After the first steps, it warns about trainable weights that got no gradient, such as adapters that never ran.
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
        super().__init__(warnings.warn)
        self.options: dict[str, Any] = {"only": only, "exclude": exclude, "verify": verify}
        self.undo = undo
        self.show = show
        self.report: Report | None = None
        self.model: nn.Module | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        inner = getattr(model, "_orig_mod", model)
        if not isinstance(inner, nn.Module) or inner is self.model:
            return
        self.model, self.report = inner, apply(inner, **self.options)
        if self.show is not None and state.is_world_process_zero:
            self.show(self.report)

    on_train_begin = on_init_end

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        super().on_train_end(args, state, control)
        if self.undo and self.report is not None:
            self.report.undo()
            self.model = None
