# SPDX-License-Identifier: Apache-2.0
"""What a device's memory holds over time, by category, from the events of its allocator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# From the bottom of a picture to its top.
CATEGORIES = ("weights", "gradients", "optimizer", "checkpoints", "logits and loss", "other")
WEIGHTS, GRADIENTS, OPTIMIZER, CHECKPOINTS, LOGITS, OTHER = CATEGORIES
# As many as a picture can show.
POINTS = 1000

# Bytes of a block and when it was taken → category, or None.
Guess = Callable[[int, float], str | None]


@dataclass(frozen=True)
class Event:
    """Memory that was taken, or released where bytes are negative, at a time in microseconds."""

    time: float
    address: int
    bytes: int


@dataclass(frozen=True)
class Tag:
    """What the memory at an address was for at a time."""

    time: float
    address: int
    category: str


@dataclass(frozen=True)
class Timeline:
    """Bytes of each category from each time on, in milliseconds since the first; `steps`: when a step began."""

    milliseconds: list[float]
    bytes: dict[str, list[int]]
    steps: list[float] = field(default_factory=list)

    @property
    def totals(self) -> list[int]:
        return [sum(values) for values in zip(*self.bytes.values(), strict=True)]

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of each category where all together are most."""
        totals = self.totals
        place = totals.index(max(totals)) if totals else None
        return {name: 0 if place is None else values[place] for name, values in self.bytes.items()}

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
    """What was held from `start` on.

    held    address → bytes of what was there before the first event
    tags    of the tags that fall into the life of a block the earliest counts
    guess   for blocks that have no tag
    """
    blocks = _blocks(held, sorted(events, key=lambda event: event.time))
    for tag in sorted(tags, key=lambda tag: tag.time):
        lives = blocks.get(tag.address, [])
        place = bisect_right(lives, tag.time, key=lambda block: block.start) - 1
        if place >= 0 and tag.time < lives[place].end and lives[place].category is None:
            lives[place].category = tag.category
    return _summed([block for lives in blocks.values() for block in lives], guess, steps, start)


def logits_sizes(vocabulary: int, hidden: int, tokens: int | None) -> Guess:
    """Tells logits, and what is computed from them, by their size: rows of one value for each word of the vocabulary.

    The gradient of the head is such a matrix, too, with `hidden` rows. The plain loss has logits of all tokens of a batch; the fused one
    has fewer rows at a time, for which tokens is None, and `hidden` rows are then taken for the gradient. No other size of a model is a
    multiple of its vocabulary, unless that is a power of two.
    """

    def guess(size: int, time: float) -> str | None:
        rows = [_rows(size, vocabulary * item) for item in (2, 4)]
        if not any(rows):
            return None
        return GRADIENTS if hidden in rows and tokens not in rows else LOGITS

    return guess


def _rows(size: int, of: int) -> int:
    """How many rows of so many bytes a block has; 0 if it has other things."""
    rows, rest = divmod(size, of)
    # An allocator may round sizes up, which of long rows leaves a small rest.
    return rows if rest == 0 or rest < 512 < of // 32 else 0


def _blocks(held: Mapping[int, int], events: Iterable[Event]) -> dict[int, list[_Block]]:
    """Address → the blocks that were there, one after the other."""
    blocks = {address: [_Block(float("-inf"), float("inf"), size)] for address, size in held.items()}
    for event in events:
        lives = blocks.setdefault(event.address, [])
        # What is taken again was released, even if the allocator did not tell; what is released unseen was there before.
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
    # Of what happens at the same time the releases come first, so that no peak is made up.
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
    """So few that a picture can show them; of those that are left out none was higher than its neighbours."""
    if len(points) <= POINTS:
        return points
    size = -(-2 * len(points) // POINTS)
    kept = points[:1]
    for first in range(1, len(points), size):
        group = points[first : first + size]
        highest = max(range(len(group)), key=lambda place: sum(group[place][1].values()))
        kept += [group[place] for place in sorted({highest, len(group) - 1})]
    return kept
