# SPDX-License-Identifier: Apache-2.0
"""The report of which modules were replaced, which were not, and why; it can undo the replacements."""

import copy
import json
import re
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from types import MethodType
from typing import Any

from torch import nn

from liger_hf.errors import ModelError
from liger_hf.patch import Patch
from liger_hf.rules.head.weights import OPTIMIZERS

# REPLACEABLE is the verdict of `inspect`, which changes nothing.
REPLACED, REPLACEABLE, LEFT = "replaced", "replaceable", "left"
# The ends of reasons for modules that the caller does not want replaced.
EXCLUDED, UNLISTED = "excluded by exclude=", "not listed in only="
ATTRIBUTE = "liger_report"
OTHERS = (
    "Modules without a row match no rule. liger_hf.inspect(module, only=[op]) says what the rule of an op looks for."
)
PICKLED = "a pickled model comes back without Liger; call liger_hf.apply again"


def pattern(name: str) -> str:
    """Return the name of a module with layer numbers as *."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


@dataclass(frozen=True)
class Row:
    """Modules of one kind that are handled alike.

    pattern  their names, with layer numbers as *, or as {0,3} if only these layers are handled alike
    backend  the backend of the op on their device; empty if they were left
    verdict  "replaced" or "left", and "replaceable" for a model that was only inspected
    reason   why
    details  the figures of a failed check
    """

    pattern: str
    count: int
    module: str
    op: str
    backend: str
    verdict: str
    reason: str
    details: str = ""


@dataclass(eq=False)
class Report(AbstractContextManager["Report"]):
    """The result of `apply` or `inspect`; as a context manager it undoes what was applied when the block ends.

    absent           op that only= names → why no module was a candidate for it
    notes            other sentences for the user
    implementations  from `inspect`: the implementations of Transformers that the model uses, and which would be faster
    """

    model: str
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    implementations: list[str] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list, repr=False)
    owner: nn.Module | None = field(default=None, repr=False)
    earlier: "Report | None" = field(default=None, repr=False)

    @property
    def replaced(self) -> dict[str, int]:
        """Op → number of modules that it replaces."""
        return self._counts(REPLACED)

    @property
    def replaceable(self) -> dict[str, int]:
        """Op → number of modules that `apply` would replace with it."""
        return self._counts(REPLACEABLE)

    def _counts(self, verdict: str) -> dict[str, int]:
        counts = Counter[str]()
        for row in self.rows:
            if row.verdict == verdict:
                counts[row.op] += row.count
        return dict(counts)

    def attach(self, model: nn.Module) -> None:
        """Become `model.liger_report`; the report of an earlier `apply` stays behind this one."""
        self.owner, self.earlier = model, model.__dict__.get(ATTRIBUTE)
        model.__dict__[ATTRIBUTE] = self
        model.__dict__["_replicate_for_data_parallel"] = MethodType(_replicate_for_data_parallel, model)

    def _detach(self) -> None:
        if self.owner is None:
            return
        state, self.owner = self.owner.__dict__, None
        latest = state.get(ATTRIBUTE)
        later = latest
        while isinstance(later, Report) and later is not self and later.earlier is not self:
            later = later.earlier
        if latest is self and self.earlier is not None:
            state[ATTRIBUTE] = self.earlier
        elif latest is self:
            del state[ATTRIBUTE], state["_replicate_for_data_parallel"]
        elif isinstance(later, Report):
            later.earlier = self.earlier

    def undo(self) -> None:
        """Restore every replaced module on its instance; a second call does nothing.

        Several reports of one model can be undone in any order.

        Raises ModelError if a forward was replaced again after `apply`; all other modules are restored.
        """
        stuck: list[str] = []
        while self.patches:
            patch = self.patches.pop()
            if not patch.undo():
                stuck.append(f"{type(patch.owner).__name__}.{patch.attribute}")
        self._detach()
        OPTIMIZERS.release()
        # A wrapper around the model's forward calls the original forward once the head is restored.
        stuck = [name for name in stuck if not name.startswith(self.model + ".")]
        if stuck:
            raise ModelError(
                f"liger_hf.undo: every forward must still be Liger's, {', '.join(dict.fromkeys(stuck))} was replaced "
                "again; undo that first"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle, without patches: an unpickled model has the forwards of its classes."""
        rows = [replace(row, verdict=LEFT, reason=PICKLED) if row.verdict == REPLACED else row for row in self.rows]
        return {**vars(self), "rows": rows, "patches": [], "owner": None, "earlier": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Report":
        """Copy the report with its patches for a copy of the model, which is patched in the same way."""
        copied = memo[id(self)] = Report(self.model)
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied

    def __exit__(self, *_: object) -> None:
        self.undo()

    def to_dict(self) -> dict[str, Any]:
        """Return all contents of the report as plain data."""
        lists = {"notes": list(self.notes), "implementations": list(self.implementations)}
        return {"model": self.model, "rows": [asdict(row) for row in self.rows], "absent": dict(self.absent), **lists}

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the cells of a table: modules, count, class, op, backend, verdict and reason."""
        rows = [(r.pattern, str(r.count), r.module, r.op, r.backend, r.verdict, r.reason) for r in self.rows]
        return [*rows, *(("–", "0", "–", op, "", LEFT, reason) for op, reason in self.absent.items())]

    def title(self) -> str:
        """Return a line that says how many modules of the model each op replaces, and how many are left."""
        planned = any(row.verdict == REPLACEABLE for row in self.rows)
        counts = ", ".join(f"{count} × {op}" for op, count in (self.replaceable if planned else self.replaced).items())
        left = sum(row.count for row in self.rows if row.verdict == LEFT)
        end = f", {left} left" * bool(left) if self.rows else ". No module matches a rule."
        return f"{self.model}: {counts or 'nothing'} {'can be replaced' if planned else 'replaced'}{end}"

    def sentences(self) -> list[str]:
        """Return the sentences below the rows: implementations, notes, and how to ask about any other module."""
        return [*self.implementations, *self.notes, OTHERS]

    def __str__(self) -> str:
        rows = [("modules", "count", "class", "op", "backend", "verdict", "reason"), *self.cells()]
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:5]]
        lines = [
            "  ".join([*map(str.ljust, cells, widths), f"{verdict}: {reason}"]) for *cells, verdict, reason in rows
        ]
        return "\n".join([self.title(), *(lines if len(rows) > 1 else ()), *self.sentences()])


def _replicate_for_data_parallel(self: nn.Module) -> Any:
    """Refuse DataParallel, whose replicas would call forwards that are bound to the modules of the first GPU."""
    raise ModelError(
        "liger_hf.apply: to run on several GPUs, start one process per GPU, torch.nn.DataParallel copies the model "
        "within one; start with torchrun or accelerate launch, or show one GPU with CUDA_VISIBLE_DEVICES=0"
    )
