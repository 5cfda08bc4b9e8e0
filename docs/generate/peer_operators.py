# SPDX-License-Identifier: Apache-2.0
"""Every operator of liger-kernel beside ours: `python docs/generate/peer_operators.py` writes docs/benchmarks/peer-operators.md.

peer_operators.toml says which op is which; every figure is from committed results in which both were measured in one run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peer_results import (
    CARDS,
    COPY,
    DTYPE,
    EAGER,
    ERRORS,
    OURS,
    PASSES,
    PEER,
    PRECISION,
    Pair,
    error,
    failures,
    measured,
    pairs,
)

from liger_bench import markdown
from liger_core.builtin import CATALOGUE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "peer-operators.md"
DESCRIPTION = Path(__file__).with_suffix(".toml")
# The bounds on the speed, and by how much ratios of errors may differ and be equal.
SPEED, EQUAL = 1.0, 0.001
NONE = "–"
# The columns of a summary.
SUMMARY = ("shapes", "forward", "full", "error", "of copy bandwidth")


def described(path: Path = DESCRIPTION) -> dict[str, Any]:
    """Raises ValueError if operators and ops of the description are not those that there are."""
    found = tomllib.loads(path.read_text())
    wrong = mistakes(found, [op.name for op in CATALOGUE])
    if wrong:
        raise ValueError(f"{path.name}: {'; '.join(wrong)}")
    return found


def mistakes(found: dict[str, Any], ops: Sequence[str]) -> list[str]:
    """What is wrong with a description, given the names of all ops."""
    named = [(operator, op) for operator, names in _operators(found).items() for op in names]
    wrong = [f"{operator} names the op {op}, which does not exist" for operator, op in named if op not in ops]
    tables = [set(found[name]) for name in ("compared", "covered", "none")]
    twice = sorted((tables[0] & tables[1]) | (tables[0] & tables[2]) | (tables[1] & tables[2]))
    wrong += [
        f"variants names {operator}, which is not compared"
        for operator in found["variants"]
        if operator not in found["compared"]
    ]
    return wrong + [f"{operator} is in two tables" for operator in twice]


def _operators(found: dict[str, Any]) -> dict[str, list[str]]:
    """Operator → ops that are compared with it or cover it."""
    return found["compared"] | {operator: entry["ops"] for operator, entry in found["covered"].items()}


def page() -> str:
    description = described()
    rows = {card: measured(card) for card in CARDS}
    ops = dict.fromkeys(op for names in description["compared"].values() for op in names)
    found = {card: pairs(rows[card], ops) for card in CARDS}
    places = list(dict.fromkeys(pair.place for card in CARDS for pair in found[card]))
    first, *others = CARDS
    parts = [
        "# The operators of liger-kernel",
        markdown.generated("python docs/generate/peer_operators.py"),
        ABOUT.format(
            version=description["version"],
            first=first,
            others=" and ".join(f"an {card}" for card in others),
            dtype=DTYPE,
            copy=COPY,
            precision=PRECISION,
        ),
        "## Operators",
        _overview(description, found[first]),
        "Ops of Liger that the table does not name have no operator in liger-kernel.",
        _missing(description, found[first]),
        *(
            part
            for card in others
            for part in (f"On an {card}, the ops that were measured there:", _measured(description, found[card]))
        ),
        "## Shapes",
        SHAPES.format(speed=SPEED, copy=COPY),
    ]
    for card in CARDS:
        parts += [
            f"### On an {card}",
            _shapes(found[card], places),
            markdown.reasons(failures(rows[card], found[card])),
            *_below(found[card]),
        ]
    every = [pair for card in CARDS for pair in found[card]]
    parts += ["## What bounds them", _bounds(description["bounds"], every), "## Runs", _runs(every, places)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _overview(description: dict[str, Any], found: Sequence[Pair]) -> str:
    lines = []
    for operator, ops in description["compared"].items():
        own = _own(description, operator, found)
        lines.append([f"`{operator}`", _links(ops), "measured" if own else "not measured", *_summary(own)])
    for operator, entry in description["covered"].items():
        lines.append([f"`{operator}`", f"{_links(entry['ops'])}: {entry['how']}", "not compared", *_summary([])])
    lines += [[f"`{operator}`", reason, "none", *_summary([])] for operator, reason in description["none"].items()]
    return markdown.table(("liger-kernel", "Liger", "status", *SUMMARY), lines, right=range(3, 3 + len(SUMMARY)))


def _measured(description: dict[str, Any], found: Sequence[Pair]) -> str:
    """The operators that were measured."""
    owned = {operator: own for operator in description["compared"] if (own := _own(description, operator, found))}
    lines = [
        [f"`{operator}`", _links(description["compared"][operator]), *_summary(own)] for operator, own in owned.items()
    ]
    return markdown.table(("liger-kernel", "Liger", *SUMMARY), lines, right=range(2, 2 + len(SUMMARY)))


def _own(description: dict[str, Any], operator: str, found: Sequence[Pair]) -> list[Pair]:
    """The pairs of an operator: those of its variant, or of its ops without the variants of other operators."""
    variants = description["variants"]
    pairs_of_ops = [pair for pair in found if pair.op in description["compared"][operator]]
    if operator in variants:
        return [pair for pair in pairs_of_ops if pair.variant == variants[operator]]
    return [pair for pair in pairs_of_ops if pair.variant not in variants.values()]


def _missing(description: dict[str, Any], found: Sequence[Pair]) -> str:
    """The command that measures what no run has."""
    operators = [operator for operator in description["compared"] if not _own(description, operator, found)]
    if not operators:
        return ""
    ops = dict.fromkeys(op for operator in operators for op in description["compared"][operator])
    command = f"liger bench {' '.join(ops)} --backend {OURS} --peer {EAGER} --peer {PEER} --out RESULTS"
    return f"What is not measured yet:\n\n<!-- not run: it takes minutes on a GPU -->\n\n```bash\n{command}\n```"


def _summary(own: Sequence[Pair]) -> list[str]:
    """Number of shapes; from the lowest to the highest speed, largest ratio of errors, shares where the shape is not short."""
    if not own:
        return [NONE] * len(SUMMARY)
    speeds = [_range([value for pair in own if (value := pair.speed(name)) is not None]) for name in PASSES]
    errors = [value for pair in own for column in ERRORS if (value := pair.error(column, pair.peer)) is not None]
    shares = [
        value for pair in own for name in PASSES if (value := pair.bandwidth(name)) is not None and not pair.short(name)
    ]
    return [str(len({pair.shape for pair in own})), *speeds, _form(max(errors, default=None)), _range(shares, unit="")]


def _shapes(found: Sequence[Pair], places: Sequence[tuple[str, ...]]) -> str:
    lines = []
    for pair in found:
        lines.append([
            _links([pair.op]), pair.shape, pair.variant,
            *(_form(pair.speed(name), " ×") for name in PASSES),
            " / ".join(_form(pair.error(column, pair.peer)) for column in ERRORS),
            f"{_form(pair.error(ERRORS[0], pair.eager))} / {_form(pair.gradient_error_to_eager())}",
            *(_form(pair.bandwidth(name)) + (f" ({_form(pair.of_copy(name))})" if pair.short(name) else "") for name in PASSES),
            f"[{places.index(pair.place) + 1}](#runs)",
        ])  # fmt: skip
    head = (
        "op",
        "shape",
        "against",
        "forward",
        "full",
        "error ÷ its",
        "error ÷ eager",
        "copy, forward",
        "copy, full",
        "run",
    )
    return markdown.table(head, markdown.sparse(lines), right=range(3, len(head)))


def _below(found: Sequence[Pair]) -> list[str]:
    """The figures beyond the bounds, or a sentence that there are none."""
    slow = [
        f"{pair.op} {pair.shape}, {name}{'' if pair.variant == PEER else f', against {pair.variant}'}: {value:.3f} ×"
        f"{', equal within the spread' if pair.within_spread(name) else ''}"
        for pair, name, value in _figures(found, Pair.speed)
        if value < SPEED
    ]
    low = _low(found)
    short = [
        (pair, name, value) for pair, name, value in _figures(found, Pair.of_copy) if value < COPY and pair.short(name)
    ]
    return [
        _list(f"Slower than {PEER}, its time ÷ Liger's:", slow),
        _list(
            f"Below {COPY} of copy bandwidth: the share; the share of a CUDA graph, whose results keep their memory; time of a copy ÷ Liger's:",
            [
                f"{pair.op} {pair.shape}, {name}: {'; '.join(_form(part, digits=3) for part in (value, pair.replayed(name), pair.of_copy(name)))}"
                for pair, name, value in low
            ],
        ),
        _list(
            f"At shapes so short that the copy itself is below {COPY}, time of the copy ÷ Liger's:",
            [f"{pair.op} {pair.shape}, {name}: {value:.3f}" for pair, name, value in short],
        ),
        _list("With a larger error:", [line for pair in found for line in _worse(pair)]),
    ]


def _low(found: Sequence[Pair]) -> list[tuple[Pair, str, float]]:
    """Shares of copy bandwidth below the bound, at shapes that are long enough for a copy to reach it."""
    return [
        (pair, name, value)
        for pair, name, value in _figures(found, Pair.bandwidth)
        if value < COPY and not pair.short(name)
    ]


def _bounds(reasons: dict[str, str], found: Sequence[Pair]) -> str:
    """What bounds the shapes below the bandwidth of a copy. Raises ValueError if a reason is of none of them."""
    low = {key for pair, _, _ in _low(found) for key in (pair.op, f"{pair.op} {pair.shape}")}
    stale = [key for key in reasons if key not in low]
    if stale:
        raise ValueError(
            f"{DESCRIPTION.name}: bounds names {', '.join(stale)}, which no row below {COPY} of copy bandwidth is of; remove it"
        )
    # Reasons may hold links.
    return "\n".join(f"* {key}: {reason}" for key, reason in reasons.items())


def _figures(found: Sequence[Pair], figure: Callable[[Pair, str], float | None]) -> list[tuple[Pair, str, float]]:
    return [(pair, name, value) for pair in found for name in PASSES if (value := figure(pair, name)) is not None]


def _worse(pair: Pair) -> Iterator[str]:
    """The errors that are larger than those of the peer or of eager PyTorch, with what they are."""
    for column in ERRORS:
        what, mine, theirs = column.removeprefix("error_"), error(pair.ours, column), error(pair.peer, column)
        value = pair.error(column, pair.peer)
        if value is not None and value > 1 + EQUAL:
            yield f"{pair.op} {pair.shape}, {what}: {value:.3f} × that of {pair.variant} ({mine:.1e} and {theirs:.1e})"
    for what, value in (("outputs", pair.error(ERRORS[0], pair.eager)), ("gradients", pair.gradient_error_to_eager())):
        if value is not None and value > 1 + EQUAL:
            yield f"{pair.op} {pair.shape}, {what}: {value:.3f} × that of eager PyTorch"


def _list(title: str, lines: Iterable[str]) -> str:
    shown = "\n".join(f"* {markdown.escaped(line)}" for line in dict.fromkeys(lines))
    return f"{title}\n\n{shown}" if shown else f"{title} none."


def _runs(found: Sequence[Pair], places: Sequence[tuple[str, ...]]) -> str:
    lines = []
    for number, place in enumerate(places, start=1):
        folder, machine, versions, commit = place
        days = sorted({pair.run[-1][:10] for pair in found if pair.place == place})
        lines.append([
            str(number), f"[{folder}](../../benchmarks/results/{folder})", ", ".join(days), machine, commit[:7], _libraries(versions)
        ])  # fmt: skip
    return markdown.table(("run", "results", "date", "machine", "commit", "versions"), lines, right=(0,))


def _libraries(versions: str) -> str:
    return ", ".join(
        part for part in versions.split(", ") if part.split()[0] in ("torch", "triton", "liger-kernel", "cuda")
    )


def _links(ops: Iterable[str]) -> str:
    return ", ".join(f"[{op}](../../packages/liger-core/src/liger_core/ops/{op}.py)" for op in ops)


def _form(value: float | None, unit: str = "", digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def _range(values: Sequence[float], unit: str = " ×") -> str:
    if not values:
        return NONE
    low, high = _form(min(values)), _form(max(values))
    return (low if low == high else f"{low} – {high}") + unit


ABOUT = """
Each function of tensors in liger-kernel {version}, and Liger's op for it. Both ran interleaved in {dtype}, on an {first} unless {others} is named.

| column | meaning |
| --- | --- |
| *forward*, *full* | liger-kernel's time ÷ Liger's, from the lowest to the highest shape: more than 1 is faster. *Full* is forward and backward. The *forward* of losses has no gradients |
| *error* | the largest ratio of Liger's error to liger-kernel's against float64, of outputs and of gradients. Errors up to {precision:.1e}, the precision of float32, count as equal |
| *of copy bandwidth* | the least traffic of a call ÷ its time, as a fraction of a plain copy's bandwidth. Only shapes whose copy reaches {copy} of it; none for ops limited by matmuls |
| *not measured* | no committed run has both |
| *not compared* | no single op does the same |
""".strip()
SHAPES = """
The tables have each shape in its newest run. Errors are those of outputs / of gradients. For some shapes, a plain copy of as many bytes stays below {copy} of
copy bandwidth. They have the copy's time ÷ Liger's in brackets. A `–` was not measured, or has no meaning there.

Variants of liger-kernel: `fp32` accumulates in float32, as Liger does; `long chunks` has `chunk_mem_const=32`; `soft labels` is `liger_fused_linear_kl_div`.

Below each table are the shapes beyond the bounds. The bounds are {speed:.1f} × the speed, no larger errors, and for memory-bound ops {copy} of copy bandwidth.
Times are equal within the spread if each median is between the other's 20th and 80th percentiles.
""".strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
