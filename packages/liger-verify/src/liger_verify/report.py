# SPDX-License-Identifier: Apache-2.0
"""The result of a comparison, and its probable explanation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from liger_core.errors import listed

# A size explains a factor up to this relative distance.
NEAR = 1e-2


@dataclass(frozen=True)
class Difference:
    """The difference between the ranks' gradient of one parameter and the true one, which one process computes.

    error    the relative error on the worst rank; infinite without a gradient, or for one of another shape
    factor   the multiple of the true gradient that is closest to the worst rank's
    rest     the relative distance to this multiple
    errors   the relative error on each rank
    summed   factor and rest of the sum over all ranks, which reveal gradients that were never summed
    problem  why the gradients cannot be compared, if they cannot
    """

    name: str
    error: float
    factor: float = math.nan
    rest: float = math.nan
    errors: tuple[float, ...] = ()
    summed: tuple[float, float] = (math.nan, math.nan)
    problem: str = ""

    @classmethod
    def of(cls, name: str, ranks: Sequence[dict[str, float] | None], least: float) -> Self:
        """Make a difference from the measurements of each rank.

        least  the smallest norm that errors are relative to
        """
        apart = [i for i, measured in enumerate(ranks) if measured is None or "apart" not in measured]
        if apart:
            problem = _problem(ranks[apart[0]])
            where = "" if len(apart) == len(ranks) or not problem else f" on {_ranks(apart)}"
            return cls(name, math.inf if problem else 0.0, problem=problem + where)
        known = [measured for measured in ranks if measured is not None]
        size = max(known[0]["truth"] ** 0.5, least)
        # NaN counts as an infinite error.
        distances = [math.inf if math.isnan(measured["apart"]) else measured["apart"] ** 0.5 for measured in known]
        errors = tuple(distance / size if size else (math.inf if distance else 0.0) for distance in distances)
        worst = known[max(range(len(known)), key=lambda i: errors[i])]
        factor, rest = _multiple(worst["square"], worst["product"], worst["truth"], size)
        summed = _multiple(worst["sum square"], worst["sum product"], worst["truth"], size)
        return cls(name, max(errors), factor, rest, errors, summed)

    @property
    def layer(self) -> str:
        """The module that the parameter's module is in: "model.layers.1.mlp" of "model.layers.1.mlp.up_proj.weight"."""
        parts = self.name.split(".")
        return ".".join(parts[:-2] or parts[:-1] or parts)


def _problem(measured: dict[str, float] | None) -> str:
    """Return why a gradient cannot be compared; empty if it is missing on both sides."""
    if measured is None:
        return "it is not there"
    if measured["unknown"]:
        return "" if measured["missing"] else "one process has no gradient for it"
    return "it has no gradient" if measured["missing"] else "its gradient has another shape"


def _multiple(square: float, product: float, truth: float, size: float) -> tuple[float, float]:
    """Return the closest multiple of the true gradient, as a factor, and the relative distance to it."""
    if not truth:
        return math.nan, math.nan
    factor = product / truth
    return factor, max(0.0, square - factor * product) ** 0.5 / size


@dataclass(frozen=True)
class Report:
    """The result of a comparison. `right` says whether it passed; `str(report)` describes it in sentences.

    loss         the loss of one process in float64
    losses       the loss of each rank
    norm         the norm of all gradients of one process
    differences  one for each parameter, in the order of the forward pass
    missing      parameters that have a gradient on one process, but on no rank
    sizes        the number of ranks of each dimension, as passed to `compare`
    unused       parameters that require a gradient and have none on one process
    rounded      gradients whose error is within the round-off of one process, such as gradients that are 0 by nature
    """

    loss: float
    losses: list[float]
    norm: float
    differences: list[Difference]
    missing: list[str]
    sizes: Mapping[str, int]
    tolerance: float
    unused: list[str] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Difference]:
        """The gradients that differ, those closest to the loss first."""
        return [d for d in reversed(self.differences) if not d.error <= self.tolerance]

    @property
    def wrong_losses(self) -> list[int]:
        """The ranks whose loss differs."""
        most = self.tolerance * max(abs(self.loss), 1e-3)
        return [rank for rank, loss in enumerate(self.losses) if not abs(loss - self.loss) <= most]

    @property
    def right(self) -> bool:
        return not (self.wrong or self.wrong_losses or self.missing)

    @property
    def largest_error(self) -> float:
        """The relative error of the gradient that differs most."""
        return max((d.error for d in self.differences), default=0.0)

    def sentences(self) -> list[str]:
        """Return sentences on the differences and their explanation."""
        lines = [self._of_loss()] if self.wrong_losses else []
        wrong = self.wrong
        if wrong:
            lines.append(
                f"going back from the loss, gradients first diverge at {wrong[0].name} in {wrong[0].layer}: "
                f"{self._explained(wrong[0])} ({len(wrong)} of {len(self.differences)} gradients differ)"
            )
            others = {self._explained(d) for d in wrong} - {self._explained(wrong[0])}
            for explanation in sorted(others):
                alike = [d for d in wrong if self._explained(d) == explanation]
                lines.append(f"{listed([d.name for d in alike])}: {explanation}")
        if self.missing:
            lines.append(
                f"no rank returns a gradient for {', '.join(self.missing[:3])}{' …' if len(self.missing) > 3 else ''}"
            )
        return lines

    @property
    def notes(self) -> list[str]:
        """The sentences on parameters that do not affect the verdict."""
        unused = (
            f"no loss depends on {listed(self.unused)}, which {'has' if len(self.unused) == 1 else 'have'} no gradient"
        )
        rounded = (
            f"{listed(self.rounded)}: within the round-off of one process in float32, more than the tolerance of so "
            "small a gradient"
        )
        return [note for note, names in ((unused, self.unused), (rounded, self.rounded)) if names]

    def __str__(self) -> str:
        count = len([d for d in self.differences if d.name not in self.unused])
        sentences = self.sentences() or [
            f"loss {self.loss:.6f} and {count} gradients on {len(self.losses)} ranks are those of one process in "
            f"float64 (largest relative error {self.largest_error:.1e})"
        ]
        return ("right: " if self.right else "wrong: ") + "\n       ".join(sentences + self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary, for --json."""
        return {
            "right": self.right,
            "loss": self.loss,
            "losses": self.losses,
            "gradient_norm": self.norm,
            "tolerance": self.tolerance,
            "sizes": dict(self.sizes),
            "sentences": self.sentences(),
            "notes": self.notes,
            "gradients": {d.name: {"error": d.error, "factor": d.factor, "rest": d.rest} for d in self.differences},
        }

    def _of_loss(self) -> str:
        ranks, got = self.wrong_losses, self.losses[self.wrong_losses[0]]
        text = f"the loss is {got:.6f}, not {self.loss:.6f}"
        if len(ranks) < len(self.losses):
            text += f" on {_ranks(ranks)}"
        if math.isnan(got):
            return f"{text}: a mean over the tokens of a rank that has none is 0 / 0"
        for name, size in self._distinct():
            if abs(got - self.loss - math.log(size)) < NEAR * math.log(size):
                times = "twice" if size == 2 else f"{size} times"
                return f"{text}: larger by log {size} ({name}), as if the classes of every rank were counted {times}"
        named = self._size(got / self.loss) if self.loss else ""
        return f"{text}: {got / self.loss:.4g} times as large{named}" if self.loss else text

    def _explained(self, d: Difference) -> str:
        if d.problem:
            return d.problem
        fine = [i for i, error in enumerate(d.errors) if error <= self.tolerance]
        where = f" on {_ranks([i for i in range(len(d.errors)) if i not in fine])}" if fine else ""
        # A larger distance is more than the round-off of the measurement.
        exact = max(10 * self.tolerance, 1e-3)
        if d.rest <= exact:
            if not math.isfinite(d.factor):
                return f"it is not finite{where}"
            if not d.factor:
                return f"it is zero{where}"
            return f"it is {d.factor:.4g} times the right one{self._size(d.factor)}{where}"
        factor, rest = d.summed
        if rest <= exact:
            names = [name for name, size in self._distinct() if abs(factor * size / self.sizes["ranks"] - 1) < NEAR]
            over = f" over {names[0]}" if names and names[0] != "ranks" else ""
            return f"every rank has only a part of it: it was not summed{over}{where}"
        return f"relative error {d.error:.2g}, of which no factor explains more than {1 - d.rest / d.error:.0%}{where}"

    def _size(self, factor: float) -> str:
        """Return a phrase with the size that equals a factor or its inverse, or an empty string."""
        for name, size in self._distinct():
            for value, phrase in ((size, ""), (1 / size, "1 / ")):
                if abs(factor / value - 1) < NEAR:
                    return f", which is {phrase}{name} ({size})"
        return ""

    def _distinct(self) -> list[tuple[str, int]]:
        """Return the sizes other than 1, each value once with all its names."""
        names: dict[int, list[str]] = {}
        for name, size in self.sizes.items():
            names.setdefault(size, []).append(name)
        aliases = {size: [n for n in all_names if n != "ranks"] or all_names for size, all_names in names.items()}
        return [(" or ".join(aliases[size]), size) for size in names if size > 1]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
