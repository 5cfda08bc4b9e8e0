# SPDX-License-Identifier: Apache-2.0
"""`--checkpoint auto` spends the memory that is left, and never more; what a layer keeps does not change what it
learns."""

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from liger_train import checkpointing
from liger_train.auto_checkpoint import (
    EXPOSED,
    HIDDEN,
    MARGIN,
    RECOMPUTES,
    AutoCheckpoint,
    KeepPolicy,
    StepMemory,
    inputs_to_offload,
    splits,
)
from liger_train.checkpointing import Keeps
from liger_train.model import build
from liger_train.setup import Setup

GIB = 2**30
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """The memory of a step, as a timeline: what every layer keeps in each state, and what comes and goes between."""

    layers: int
    static: int
    keeps: tuple[int, int, int]
    loss: int
    gradients: int
    temporary: int
    ladder: tuple[Keeps, ...] = RECOMPUTES

    def seen(self, policy: KeepPolicy, peak: int = 0) -> StepMemory:
        parts = policy.parts
        # An offloaded input is gone when its layer is done; what the last layer keeps, its output, is not.
        keeps = dict(zip(RECOMPUTES, (size // parts for size in self.keeps), strict=True)) | {Keeps.NOTHING: 0}
        kept = [keeps[policy.keeps(layer)] for layer in range(self.layers)]
        # From the second part on the gradients of the first one are there.
        earlier = self.layers * self.gradients if parts > 1 else 0
        before = self.static + sum(kept[:-1])
        peak = max(peak, earlier + before + kept[-1] + self.loss // parts)
        held = earlier + before + kept[-1]
        measured = kept[-1] or keeps[Keeps.INPUT]
        for done, layer in enumerate(reversed(range(self.layers))):
            # Whatever was not kept is there again while a layer's gradients are computed.
            again = keeps[Keeps.ALL] - kept[layer]
            new = self.gradients if parts > 1 else (done + 1) * self.gradients
            peak = max(peak, held + again + self.temporary // parts + new)
            held -= kept[layer]
        return StepMemory(peak, before, measured)


def spent(step: Step, limit: int, alike: bool = True, splits: int = 1) -> tuple[KeepPolicy, list[int]]:
    """The decisions of a run, and the peak after each of its steps."""
    policy, peaks = KeepPolicy(step.layers, limit, alike, splits, step.ladder), [0]
    while not policy.settled:
        seen = step.seen(policy, peaks[-1])
        peaks.append(seen.peak)
        policy.after(seen)
        assert len(peaks) < 4 * step.layers + 9 + splits, "it never settles"
    return policy, peaks


EIGHT_BILLION = Step(32, 48 * GIB, (GIB // 2, 5 * GIB, 8 * GIB), 4 * GIB, GIB // 2, 2 * GIB)


def test_within_six_steps_as_many_layers_as_fit_keep_matmul_outputs_the_last_ones_first() -> None:
    limit = 140 * GIB
    policy, peaks = spent(EIGHT_BILLION, limit)
    kept = [policy.keeps(layer) for layer in range(32)]
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (Keeps.INPUT, Keeps.MATMULS)
    assert len(peaks) - 1 <= 6
    each = EIGHT_BILLION.keeps[Keeps.MATMULS] - EIGHT_BILLION.keeps[Keeps.INPUT]
    assert 0 <= limit * (1 - MARGIN) - peaks[-1] < each


def test_offloaded_inputs_leave_room_for_more_layers_that_keep_their_matmul_outputs() -> None:
    kept = {}
    for ladder in (RECOMPUTES, HIDDEN, EXPOSED):
        policy, peaks = spent(replace(EIGHT_BILLION, keeps=(2 * GIB, 5 * GIB, 8 * GIB), ladder=ladder), 160 * GIB)
        assert max(peaks) <= 160 * GIB * (1 - MARGIN)
        kept[ladder] = Counter(policy.keeps(layer) for layer in range(32))
    assert kept[RECOMPUTES][Keeps.MATMULS] < kept[HIDDEN][Keeps.MATMULS]
    assert kept[HIDDEN][Keeps.NOTHING] > 0
    assert kept[HIDDEN][Keeps.INPUT] == 0
    # Where copies would be waited for, inputs stay on the device if they fit.
    assert kept[EXPOSED][Keeps.NOTHING] == 0


@settings(deadline=None)
@given(
    layers=st.integers(1, 48),
    sizes=st.lists(st.integers(1, 10_000), min_size=3, max_size=3, unique=True).map(sorted),
    rest=st.tuples(*[st.integers(0, 20_000)] * 4),
    limit=st.integers(1, 2_000_000),
    splits=st.integers(1, 16),
    ladder=st.sampled_from([RECOMPUTES, HIDDEN, EXPOSED]),
)
def test_the_peak_never_passes_the_limit_by_its_doing(
    layers: int, sizes: list[int], rest: tuple[int, ...], limit: int, splits: int, ladder: tuple[Keeps, ...]
) -> None:
    step = Step(layers, rest[0], (sizes[0], sizes[1], sizes[2]), *rest[1:], ladder)
    _, peaks = spent(step, limit, splits=splits)
    assert max(peaks) <= max(limit * (1 - MARGIN), peaks[1])


def test_a_batch_is_split_so_that_every_layer_keeps_its_matmul_outputs() -> None:
    whole, _ = spent(EIGHT_BILLION, 140 * GIB)
    parts, peaks = spent(EIGHT_BILLION, 140 * GIB, splits=8)
    assert whole.parts == 1
    assert parts.parts == 3
    assert {parts.keeps(layer) for layer in range(32)} <= {Keeps.MATMULS, Keeps.ALL}
    assert len(peaks) - 1 <= 9
    assert spent(EIGHT_BILLION, 1000 * GIB, splits=8)[0].parts == 1


def test_a_batch_is_taken_in_no_more_parts_than_keep_the_device_busy() -> None:
    assert spent(EIGHT_BILLION, 140 * GIB, splits=2)[0].parts == 2
    assert splits(Setup("llama-3-8b", batch=128, sequence=512)) == 8
    assert splits(Setup("llama-3-8b", batch=2, sequence=32768)) == 2
    assert splits(Setup("llama-3-8b", batch=4, sequence=512)) == 1
    assert splits(Setup("llama-3-8b", batch=128, sequence=512, ranks=2, shard="fsdp2")) == 1


def test_layers_that_differ_are_moved_one_by_one() -> None:
    policy = KeepPolicy(4, 1000, alike=False)
    moves = [policy.after(StepMemory(100 + 10 * index, 90, 10)) for index in range(4)]
    assert moves == [1, 2, 3, 4]


def test_a_step_that_came_too_close_takes_a_layer_back_and_ends_it() -> None:
    step = replace(EIGHT_BILLION, layers=4)
    policy = KeepPolicy(4, 500 * GIB)
    for _ in range(2):
        policy.after(step.seen(policy))
    assert policy.moves == 4
    policy.after(StepMemory(499 * GIB, 0, 0))
    assert (policy.moves, policy.settled) == (3, True)
    policy.after(step.seen(policy))
    assert policy.moves == 3


def test_repeated_retries_of_the_allocator_move_a_layer_back() -> None:
    step = replace(EIGHT_BILLION, layers=4)
    policy = KeepPolicy(4, 500 * GIB)
    moves = [policy.after(replace(step.seen(policy), retried=retried)) for retried in (True, False, True, True)]
    assert (moves[0], moves[1], moves[3]) == (1, 4, moves[2] - 1)
    assert policy.settled


def test_a_settled_run_is_still_watched() -> None:
    policy, peaks = spent(EIGHT_BILLION, 140 * GIB)
    before = policy.moves
    seen = replace(EIGHT_BILLION.seen(policy, peaks[-1]), retried=True)
    assert [policy.after(seen) for _ in range(4)] == [before, before - 1, before - 1, before - 2]


def model_that_keeps(*kept: Keeps) -> Any:
    setup = Setup("tiny", precision="fp32", checkpoint="auto", device="cpu")
    model = build(setup, CPU).model
    for layer, what in zip(checkpointing.layers(model), kept, strict=True):
        checkpointing.keep(layer, what, MATMULS)
    return model


MATMULS = checkpointing.SelectiveCheckpointing()


def trained(*kept: Keeps) -> tuple[int, list[torch.Tensor | None]]:
    """Operations and gradients of a step; the first pass finds out which product is the last."""
    model, tokens = model_that_keeps(*kept), torch.arange(64).view(2, 32)
    for _ in range(2):
        model.zero_grad()
        with FlopCounterMode(display=False) as operations:
            model(input_ids=tokens, labels=tokens).loss.backward()
    return operations.get_total_flops(), [weight.grad for weight in model.parameters()]


@pytest.mark.slow
def test_what_a_layer_keeps_changes_no_gradient_and_kept_matmul_outputs_are_not_recomputed() -> None:
    every, gradients = trained(Keeps.ALL, Keeps.ALL)
    products, those = trained(Keeps.MATMULS, Keeps.MATMULS)
    nothing, others = trained(Keeps.INPUT, Keeps.MATMULS)
    assert every == products < nothing
    for found in (those, others):
        torch.testing.assert_close(found, gradients, rtol=0, atol=0)


class Simulated:
    """The memory of a model whose layers keep 10, 40 or 100 bytes of a batch as a whole, of a device with `size`."""

    KEEPS = (10, 40, 100)
    inside = tidied = False
    parts = 1
    bandwidth = 1e6

    def __init__(self, model: Any, size: int) -> None:
        self.layers, self.size, self.most = checkpointing.layers(model), size, 0

    def keeps(self, layer: Any) -> Keeps:
        if not layer.gradient_checkpointing:
            return Keeps.ALL
        if isinstance(layer._gradient_checkpointing_func, checkpointing.Offloading):
            return Keeps.NOTHING
        return Keeps.MATMULS if "context_fn" in layer._gradient_checkpointing_func.keywords else Keeps.INPUT

    def kept(self, layer: Any) -> int:
        kept = self.keeps(layer)
        return 0 if kept is Keeps.NOTHING else self.KEEPS[kept] // self.parts

    def limit(self) -> int:
        return self.size

    def allocated(self) -> int:
        return 1000 + sum(self.kept(layer) for layer in self.layers[: -1 if self.inside else None])

    def peak(self) -> int:
        self.most = max(self.most, 1000 + sum(map(self.kept, self.layers)) + 100 // self.parts)
        return self.most

    def retries(self) -> int:
        return 0

    def tidy(self) -> None:
        self.tidied = True

    def mark(self) -> float:
        """A layer takes a second."""
        return float(self.inside)

    def seconds(self, start: float, end: float) -> float:
        return 1.0

    def copies(self, size: int) -> float:
        return size / self.bandwidth

    def trained(self, model: Any, splits: int = 1, inputs: int = 0) -> list[str]:
        """Take eight steps with a Trainer; returns the notes."""
        notes: list[str] = []
        callback = AutoCheckpoint(self, notes.append, splits, inputs)
        arguments, optimizer = SimpleNamespace(device=CPU), SimpleNamespace(state={})
        callback.on_train_begin(arguments, None, None, model=model)
        self.layers[-1].register_forward_pre_hook(lambda *_: setattr(self, "inside", True), prepend=True)
        self.layers[-1].register_forward_hook(lambda *_: setattr(self, "inside", False), prepend=True)
        for step in range(8):
            self.parts = callback.parts
            callback.on_step_begin(arguments, SimpleNamespace(global_step=step), None)
            model.model(input_ids=torch.arange(8).view(1, 8))
            optimizer.state["moment"] = 1
            callback.on_step_end(arguments, SimpleNamespace(global_step=step), None, optimizer=optimizer)
        return notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "inputs", "bandwidth", "expected"),
    [
        pytest.param(1309, 0, 1e6, Keeps.MATMULS, id="matmul outputs fit"),
        pytest.param(1100, 0, 1e6, Keeps.INPUT, id="nothing more fits"),
        pytest.param(1250, 100, 1e6, Keeps.INPUT, id="the inputs are less than an eighth of the memory"),
        pytest.param(1250, 1000, 1e6, Keeps.NOTHING, id="a copy takes less time than a layer"),
        pytest.param(1290, 1000, 1e1, Keeps.INPUT, id="a copy takes longer, and the inputs fit"),
        pytest.param(1250, 1000, 1e1, Keeps.NOTHING, id="a copy takes longer, and the inputs do not fit"),
        pytest.param(10_000, 5000, 1e6, Keeps.ALL, id="everything fits"),
    ],
)
def test_layers_are_moved_while_a_model_trains_and_inputs_offloaded_where_that_is_worth_it(
    size: int, inputs: int, bandwidth: float, expected: Keeps
) -> None:
    model = model_that_keeps(Keeps.INPUT, Keeps.INPUT)
    memory = Simulated(model, size)
    memory.bandwidth = bandwidth
    (note,) = memory.trained(model, inputs=inputs)
    assert [memory.keeps(layer) for layer in memory.layers] == [expected] * 2
    assert ("layers with offloaded inputs: 2;" in note) == (expected is Keeps.NOTHING)
    assert f"layers with full recompute: {2 * (expected <= Keeps.INPUT)}," in note
    assert not memory.tidied


def test_the_host_must_have_room_for_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup("llama-3-8b", sequence=131072, precision="bf16-pure")
    for pages, expected in ((64 * GIB, 32 * GIB), (63 * GIB, 0)):
        monkeypatch.setattr("os.sysconf", lambda name, pages=pages: pages if name == "SC_PHYS_PAGES" else 1)
        assert inputs_to_offload(setup) == expected
    assert inputs_to_offload(replace(setup, ranks=2)) == 0


def test_a_batch_is_taken_in_parts_while_it_trains() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=12)).train()
    checkpointing.enable(model, "full")
    memory = Simulated(model, int(1550 / (1 - MARGIN)))
    memory.KEEPS = (10, 100, 120)
    notes = memory.trained(model, splits=8)
    # 1330 with one layer moved: 11 more want 990 of the 220 that are left.
    assert memory.parts == 5
    assert Keeps.INPUT not in map(memory.keeps, memory.layers)
    assert memory.tidied
    assert memory.most <= 1550
    assert len(notes) == 1
    assert "each batch is split into 5 parts; layers with full recompute: 0," in notes[0]
