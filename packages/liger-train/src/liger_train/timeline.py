# SPDX-License-Identifier: Apache-2.0
"""Device memory over time, by category, from the events of the allocator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# From the bottom of a picture to its top.
CATEGORIES = ("weights", "gradients", "optimizer", "checkpoints", "logits and loss", "other")
WEIGHTS, GRADIENTS, OPTIMIZER, CHECKPOINTS, LOGITS, OTHER = CATEGORIES
# As many points as a picture can show.
POINTS = 1000

# Bytes of a block and the time of its allocation → category, or None.
Guess = Callable[[int, float], str | None]


@dataclass(frozen=True)
class Event:
    """An allocation, or a release if `bytes` is negative, at a time in microseconds."""

    time: float
    address: int
    bytes: int


@dataclass(frozen=True)
class Tag:
    """The category of the memory at an address at a time."""

    time: float
    address: int
    category: str


@dataclass(frozen=True)
class Timeline:
    """Bytes of each category from each time on, in milliseconds since the first; `steps` are the starts of steps."""

    milliseconds: list[float]
    bytes: dict[str, list[int]]
    steps: list[float] = field(default_factory=list)

    @property
    def totals(self) -> list[int]:
        return [sum(values) for values in zip(*self.bytes.values(), strict=True)]

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of each category at the peak of the total."""
        totals = self.totals
        index = totals.index(max(totals)) if totals else None
        return {name: 0 if index is None else values[index] for name, values in self.bytes.items()}

    def columns(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Block:
    start: float
    end: float
    bytes: int
    category: str | None = None


def timeline(
    held: Mapping[int, int],
    events: Iterable[Event],
    tags: Iterable[Tag],
    guess: Guess = lambda size, time: None,
    steps: Sequence[float] = (),
    start: float = float("-inf"),
) -> Timeline:
    """The memory that is allocated from `start` on.

    held    address → bytes of the blocks allocated before the first event
    tags    a block gets the earliest tag within its lifetime
    guess   the category of blocks without a tag
    """
    blocks = _blocks(held, sorted(events, key=lambda event: event.time))
    for tag in sorted(tags, key=lambda tag: tag.time):
        lives = blocks.get(tag.address, [])
        index = bisect_right(lives, tag.time, key=lambda block: block.start) - 1
        if index >= 0 and tag.time < lives[index].end and lives[index].category is None:
            lives[index].category = tag.category
    return _summed([block for lives in blocks.values() for block in lives], guess, steps, start)


def logits_sizes(vocabulary: int, hidden: int, tokens: int | None) -> Guess:
    """Recognize logits, and what is computed from them, by size: a multiple of the vocabulary size.

    The gradient of the LM head has that size, too, with `hidden` rows. The baseline loss has logits for all `tokens` of
    a batch. The fused loss has fewer rows at a time; tokens is then None, and `hidden` rows are taken for the gradient.
    No other size in a model is a multiple of the vocabulary size, unless that is a power of two.
    """

    def guess(size: int, time: float) -> str | None:
        rows = [_rows(size, vocabulary * item) for item in (2, 4)]
        if not any(rows):
            return None
        return GRADIENTS if hidden in rows and tokens not in rows else LOGITS

    return guess


def _rows(size: int, of: int) -> int:
    """The number of rows of `of` bytes in a block; 0 if it is not a whole number."""
    rows, rest = divmod(size, of)
    # An allocator may round sizes up, which leaves a small remainder.
    return rows if rest == 0 or rest < 512 < of // 32 else 0


def _blocks(held: Mapping[int, int], events: Iterable[Event]) -> dict[int, list[_Block]]:
    """Address → the blocks at it, one after the other."""
    blocks = {address: [_Block(float("-inf"), float("inf"), size)] for address, size in held.items()}
    for event in events:
        lives = blocks.setdefault(event.address, [])
        # A second allocation at an address implies a release; a release without an allocation implies a block from
        # before.
        if lives and lives[-1].end == float("inf"):
            lives[-1].end = event.time
        elif event.bytes < 0:
            lives.append(_Block(float("-inf"), event.time, -event.bytes))
        if event.bytes > 0:
            lives.append(_Block(event.time, float("inf"), event.bytes))
    return blocks


def _summed(blocks: Iterable[_Block], guess: Guess, steps: Sequence[float], start: float) -> Timeline:
    changes: list[tuple[float, str, int]] = []
    for block in blocks:
        category = block.category or guess(block.bytes, block.start) or OTHER
        changes.append((block.start, category, block.bytes))
        if block.end != float("inf"):
            changes.append((block.end, category, -block.bytes))
    # At the same time, releases come first, so that no false peak appears.
    changes.sort(key=lambda change: (change[0], change[2]))
    now = dict.fromkeys(CATEGORIES, 0)
    points: list[tuple[float, dict[str, int]]] = []
    for time, category, size in changes:
        now[category] += size
        if points and points[-1][0] >= max(time, start):
            points.pop()
        points.append((max(time, start), dict(now)))
    if points and points[0][0] == float("-inf"):
        first = points[1][0] if len(points) > 1 else 0.0
        points[0] = (first, points[0][1])
    zero = points[0][0] if points else 0.0
    points = _thinned(points)
    return Timeline(
        [round((time - zero) / 1e3, 3) for time, _ in points],
        {name: [values[name] for _, values in points] for name in CATEGORIES},
        [round((time - zero) / 1e3, 3) for time in steps if time >= zero],
    )


def _thinned(points: list[tuple[float, dict[str, int]]]) -> list[tuple[float, dict[str, int]]]:
    """At most as many points as a picture can show; each local maximum is kept."""
    if len(points) <= POINTS:
        return points
    size = -(-2 * len(points) // POINTS)
    thinned = points[:1]
    for first in range(1, len(points), size):
        group = points[first : first + size]
        highest = max(range(len(group)), key=lambda index: sum(group[index][1].values()))
        thinned += [group[index] for index in sorted({highest, len(group) - 1})]
    return thinned
