# SPDX-License-Identifier: Apache-2.0
"""The peak of a setup for every batch, sequence and number of GPUs, from plans of a few of the model's layers.

At each moment of a step, memory is linear in the number of layers and in a few terms, such as the number of tokens. The
moments of models with fewer layers give the moments of the whole model. Only those that can be the peak are kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from liger_core.errors import OptionError
from liger_core.ops.head.loop import chunking
from liger_train.configs import config_of
from liger_train.plan.estimate import with_layers
from liger_train.plan.ledger import CATEGORIES, OPTIMIZER, OTHER, Ledger
from liger_train.plan.optimizers import OPTIMIZERS, weights_of
from liger_train.plan.sharding import optimizer_memory, sharding_of
from liger_train.plan.step import BACKWARD, FORWARD, UPDATE, as_option_error, fake_model, ledger_of_a_step
from liger_train.setup import Setup

# PyTorch's gradient of an embedding has another kernel, with a workspace, for more tokens.
FEW_TOKENS = 3072
MOST_TOKENS = 1 << 20
# Masks of a sliding window are squares; shards have a rank's part of the weights.
FIXED, TOKENS, SQUARE, SQUARES, SHARD = "fixed", "tokens", "square", "squares", "shard"
RANKS = (2, 8)

# A sliding window of fewer tokens, and a batch, for which rounding of sizes matters.
SHORT, FEW = 512, 1024
# The length of sequences for layers that loop over it.
LOOPED = 1024

# The category of each allocation, and the memory by category after it, from an end of a phase of the step on.
Moments = tuple[Tensor, Tensor]
# A batch, a sequence and a number of ranks.
Call = tuple[int, int, int]


class Span(NamedTuple):
    """A range of tokens in which memory is linear, and of lengths: the first one, and those that plans have."""

    low: int
    high: int
    sequence: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class Regime:
    """The lines of one range of tokens and sequence lengths, from their first values on: (line, category, term)."""

    tokens: int
    sequence: int
    lines: Tensor


@dataclass(frozen=True)
class Peaks:
    """The memory at the peak by category, for every batch, sequence and number of GPUs.

    terms       what the memory is linear in
    optimizers  a name → the bytes of its state, which are linear in the terms, too
    """

    terms: tuple[str, ...]
    regimes: tuple[Regime, ...]
    optimizers: dict[str, Tensor]
    parameters: int

    def held(self, batch: int, sequence: int, ranks: int = 1, optimizer: str = "adamw") -> dict[str, float]:
        """Return the memory of a rank at its peak, by category."""
        values = _values(self.terms, batch, sequence, ranks)
        regime = [each for each in self.regimes if each.tokens <= batch * sequence and each.sequence <= sequence][-1]
        held = max(regime.lines @ values, key=lambda line: float(line.sum()))
        held[CATEGORIES.index(OPTIMIZER)] += self.optimizers[optimizer] @ values
        return dict(zip(CATEGORIES, held.tolist(), strict=True))

    def columns(self) -> dict[str, Any]:
        """Return everything as JSON, in bytes of four digits; 0 stands for a category that holds nothing."""
        return {
            "terms": self.terms,
            "regimes": [[each.tokens, each.sequence, _short(each.lines)] for each in self.regimes],
            "optimizers": {name: _short(state) for name, state in self.optimizers.items()},
            "parameters": self.parameters,
        }

    @classmethod
    def from_columns(cls, columns: dict[str, Any]) -> Self:
        """Return the peaks that `columns` wrote."""

        def exact(values: Any) -> Tensor:
            return torch.tensor(values or [0] * len(columns["terms"]), dtype=torch.float64)

        def stacked(lines: Any) -> Tensor:
            return torch.stack([torch.stack([exact(category) for category in line]) for line in lines])

        regimes = tuple(Regime(tokens, sequence, stacked(lines)) for tokens, sequence, lines in columns["regimes"])
        states = {name: exact(state) for name, state in columns["optimizers"].items()}
        return cls(tuple(columns["terms"]), regimes, states, columns["parameters"])


def peaks(setup: Setup, optimizers: Sequence[str] = ("adamw", "adamw-8bit")) -> Peaks:
    """Plan a setup for every batch and sequence and, if it is sharded, every number of GPUs."""
    text = config_of(setup).get_text_config()
    window = _window(text)
    terms = (FIXED, TOKENS, *((SQUARE, SQUARES) if window else ()), *((SHARD,) if setup.shard != "none" else ()))
    with as_option_error(setup), ExitStack() as stack:
        models = [_Model(stack, setup, count) for count in _shallow(text)]
        regimes = []
        calls_of = _calls
        for span in _spans(setup, text, window):
            calls = list(calls_of(terms, span))
            if not calls:
                continue
            runs = [model.moments(*call) for model in models for call in calls]
            if calls_of is _calls and SQUARE not in terms and _loops(runs):
                calls_of = _calls_of_one_length
                calls = list(calls_of(terms, span))
                runs = [model.moments(*call) for model in models for call in calls]
            values = torch.stack([_values(terms, *call) for call in calls])
            layers = torch.tensor([[1.0, model.layers] for model in models], dtype=torch.float64)
            solved = _solved(torch.kron(layers, values), runs, text.num_hidden_layers)
            regimes.append(Regime(span.low, span.sequence, _largest(solved, terms, span)))
        per_layer = [_states(model, terms, optimizers) for model in models]
    first, second = models
    deeper = (text.num_hidden_layers - first.layers) / (second.layers - first.layers)
    states = {name: a + (per_layer[1][name] - a) * deeper for name, a in per_layer[0].items()}
    parameters = first.parameters + round((second.parameters - first.parameters) * deeper)
    return Peaks(terms, tuple(regimes), states, parameters)


class _Model:
    """A model of fewer layers, on fake tensors."""

    def __init__(self, stack: ExitStack, setup: Setup, layers: int) -> None:
        self.layers = layers
        self.setup = replace(stack.enter_context(with_layers(setup, layers)), accumulation=1)
        self.model, self.mode, _ = fake_model(self.setup)
        self.parameters = sum(weight.numel() for weight in self.model.parameters())

    def moments(self, batch: int, sequence: int, ranks: int) -> list[Moments]:
        setup = replace(self.setup, batch=batch, sequence=sequence, ranks=ranks)
        ledger = ledger_of_a_step(setup, self.model, sharding_of(setup, self.model), self.mode)
        self.model.zero_grad(set_to_none=True)
        return _moments(ledger)


def _loops(runs: Sequence[list[Moments]]) -> bool:
    """Whether layers loop over chunks of a sequence, as linear attention does, and so allocate more often for more."""
    allocations = torch.tensor([sum(len(labels) for labels, _ in run) for run in runs])
    return len(allocations.view(2, -1).diff(dim=0).unique()) > 1


def _moments(ledger: Ledger) -> list[Moments]:
    """Return the moments of a step back from the end of its forward pass, and on from and back to the ends of the rest.

    A layer in the middle holds no more than either the first or the last, since memory is linear in between. Moments
    are those after an allocation, because nothing else can be the peak.
    """
    sizes = torch.tensor([size for _, size, _ in ledger.events], dtype=torch.float64)
    labels = torch.tensor([CATEGORIES.index(ledger.labels.get(number, OTHER)) for number, _, _ in ledger.events])
    held = (torch.nn.functional.one_hot(labels, len(CATEGORIES)) * sizes[:, None]).cumsum(0)
    forward, rest = (
        torch.tensor([size > 0 and doing in doings for _, size, doing in ledger.events])
        for doings in ((FORWARD,), (BACKWARD, UPDATE))
    )
    return [
        (labels[forward].flip(0), held[forward].flip(0)),
        (labels[rest], held[rest]),
        (labels[rest].flip(0), held[rest].flip(0)),
    ]


def _solved(matrix: Tensor, runs: list[list[Moments]], layers: int) -> Tensor:
    """Return the memory of each moment at this number of layers: (moment, category, term)."""
    parts = []
    for aligned in zip(*runs, strict=True):
        lengths = [len(labels) for labels, _ in aligned]
        # All but a layer of the shallower model: what is beyond is aligned from its other end.
        length = 2 * min(lengths) - max(lengths)
        labels = torch.stack([labels[:length] for labels, _ in aligned])
        differ = (labels != labels[0]).any(0).nonzero()
        length = int(differ[0]) if len(differ) else length
        if not length:
            raise OptionError(
                "plan: --serve needs a model whose layers allocate alike; plan one batch at a time instead"
            )
        stacked = torch.stack([held[:length] for _, held in aligned])
        parts.append(torch.linalg.solve(matrix, stacked.flatten(1)).unflatten(0, (2, -1)).unflatten(-1, (length, -1)))
    fixed, per_layer = torch.cat(parts, 2)
    return (fixed + layers * per_layer).permute(1, 2, 0)


def _largest(moments: Tensor, terms: tuple[str, ...], span: Span) -> Tensor:
    """Return the moments that hold most for any of many batches, sequences and numbers of GPUs."""
    values = []
    for step, ranks in product(range(61), (2, 4, 8, 64) if SHARD in terms else (1,)):
        tokens = max(span.low, 64) * (span.high / max(span.low, 64)) ** (step / 60)
        longest = min(tokens, span.longest)
        for eighths in range(9 if SQUARE in terms else 1):
            sequence = longest * (min(span.shortest, longest) / longest) ** (eighths / 8)
            values.append(_values(terms, tokens / sequence, sequence, ranks))
    totals = torch.stack(values) @ moments.sum(1).T
    return moments[totals.argmax(1).unique()]


def _values(terms: Sequence[str], batch: float, sequence: float, ranks: int) -> Tensor:
    every = {FIXED: 1.0, TOKENS: batch * sequence, SQUARE: sequence**2, SQUARES: batch * sequence**2, SHARD: 1 / ranks}
    return torch.tensor([every[term] for term in terms], dtype=torch.float64)


def _states(model: _Model, terms: Sequence[str], optimizers: Sequence[str]) -> dict[str, Tensor]:
    weights = weights_of(model.model)
    states = {}
    for name in optimizers:
        many, more = (
            optimizer_memory(replace(model.setup, ranks=ranks), OPTIMIZERS[name], weights)[0] for ranks in RANKS
        )
        shard = (many - more) / (1 / RANKS[0] - 1 / RANKS[1])
        linear = {FIXED: many - shard / RANKS[0], SHARD: shard}
        states[name] = torch.tensor([linear.get(term, 0.0) for term in terms], dtype=torch.float64)
    return states


def _calls(terms: Sequence[str], span: Span) -> Iterator[Call]:
    """Yield the batches, sequences and ranks whose plans determine every term."""
    ranks = RANKS[0] if SHARD in terms else 1
    batches: tuple[int, ...] = (2,)
    if SQUARE in terms:
        # Two lengths of two batches, the first ones with room between the lengths. One sequence is laid out otherwise.
        for batch in range(2, 4096):
            fewest = max(span.low, min(FEW, span.high // 4))
            lengths = (max(span.shortest, -(-fewest // batch)), min(span.longest, (span.high - 1) // (batch + 1)))
            if lengths[1] > 1.04 * lengths[0]:
                break
        else:
            return
        batches = (batch, batch + 1)
    else:
        lengths = max(span.low, FEW) // 2 + 1, (span.high - 1) // 2
    # Attention's workspace has lengths in multiples of 128.
    first, last = -(-lengths[0] // 128) * 128, min(lengths[1], 4 * lengths[0]) // 128 * 128
    lengths = (first, last) if first < last else lengths
    calls = [(batch, length, ranks) for batch, length in product(batches, lengths)]
    yield from calls
    if SHARD in terms:
        yield (*calls[0][:2], RANKS[1])


def _calls_of_one_length(terms: Sequence[str], span: Span) -> Iterator[Call]:
    """Yield such calls of two batches: moments of loops over a sequence are alike for one length only."""
    length = min(LOOPED, max(1, span.high // 4 // 128) * 128)
    first = max(2, -(-span.low // length))
    calls = [(batch, length) for batch in (first, max(first + 1, min(4 * first, (span.high - 1) // length)))]
    ranks = RANKS[:1] if SHARD in terms else (1,)
    yield from ((*call, ranks[0]) for call in calls)
    if SHARD in terms:
        yield (*calls[0], RANKS[1])


def _spans(setup: Setup, text: Any, window: int) -> Iterator[Span]:
    def cut(tokens: int) -> tuple[bool, bool, Any]:
        chunks = chunking(tokens, text.hidden_size, text.vocab_size, torch.bfloat16, "cuda")
        return chunks.rows == tokens, chunks.rows == -(-tokens // 2), chunks.dtype

    # The gradient of a frozen embedding is not computed.
    ends = {FEW_TOKENS + 1} if setup.adapter == "none" else set()
    if setup.liger != "none":
        steps = [(t, t + 16) for t in range(49, MOST_TOKENS >> 3, 16) if cut(t) != cut(t + 16)]
        ends |= {next(t for t in range(low, high + 1) if cut(t) != cut(low)) for low, high in steps}
    bounds = sorted({1, *ends, MOST_TOKENS})
    # Nobody trains on sequences within a short window.
    sequences = (
        [(1, 1, window - 1), (window, window, MOST_TOKENS)] if window >= SHORT else [(1, window + 1, MOST_TOKENS)]
    )
    for (sequence, shortest, longest), (low, high) in product(sequences, pairwise(bounds)):
        if high > shortest:
            yield Span(max(low, sequence), high, sequence, shortest, longest)


def _window(text: Any) -> int:
    """Return the length from which attention of a sliding window needs a mask; 0 if there is none."""
    kinds = getattr(text, "layer_types", None)
    windowed = "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    return (getattr(text, "sliding_window", None) or 0) if windowed else 0


def _shallow(text: Any) -> tuple[int, int]:
    """Return two numbers of layers, which differ by the smallest pattern that repeats after the layers before it.

    The smaller number has the pattern twice. It is at least three: while a layer runs, something of the layer before it
    is still held, and the first layer of a model computes other things.
    """
    count = text.num_hidden_layers
    dense = getattr(text, "first_k_dense_replace", None) or 0
    kinds = [*zip(*(v for v in vars(text).values() if isinstance(v, list) and len(v) == count), strict=True)]
    period = next(
        p for p in range(1, count + 1) if all(a == b for a, b in zip(kinds[dense:], kinds[dense + p :], strict=False))
    )
    fewer = max(3, dense + 2 * period)
    return fewer, fewer + period


def _short(values: Tensor) -> Any:
    if values.dim():
        return [_short(value) for value in values] if values.any() else 0
    number = float(f"{float(values):.4g}")
    return int(number) if number.is_integer() else number
