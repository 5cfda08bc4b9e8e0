# SPDX-License-Identifier: Apache-2.0
"""The formula for the bytes that ranks exchange, against the collectives of a step on gloo."""

import importlib.util
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

import forks
from liger_train.plan.traffic import (
    GATHER,
    GRADIENTS,
    REDUCE,
    SCATTER,
    Exchange,
    checkpoint_bytes,
    exchanges,
    host_bytes,
)
from liger_train.setup import Setup
from train import training

RANKS = 4
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
SETUPS: dict[str, dict[str, Any]] = {
    # Before FSDP2, which accelerate remembers in the environment.
    "tensor_parallel": {"tp": 4, "checkpoint": "full"},
    "data_parallel": {"accumulation": 2},
    "fsdp2": {"shard": "fsdp2", "checkpoint": "full", "accumulation": 2},
    "bf16": {"shard": "fsdp2", "precision": "bf16"},
    "bf16_pure": {"shard": "fsdp2", "precision": "bf16-pure"},
    "float8": {"shard": "fsdp2", "precision": "fp8", "checkpoint": "full", "accumulation": 2},
    "float8_by_rows": {"shard": "fsdp2", "precision": "fp8-rowwise-pure"},
    "hybrid": {"shard": "fsdp2", "replicate": 2},
    "context_parallel": {"shard": "fsdp2", "cp": 2, "checkpoint": "full"},
}
# The sharding of 7 · 10⁹ weights over 64 ranks.
LARGE = Exchange(GRADIENTS, SCATTER, ranks=64, stride=1, size=7e9)


class Counting(TorchDispatchMode, TrainerCallback):
    """Counts the bytes of the whole tensors in the collectives of the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.step: Counter[str] = Counter()
        self.second: Counter[str] = Counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.step = Counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 2:
            self.second = self.step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # A DTensor then calls the collectives by itself.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func.__name__.replace("_", "")
        if "c10d" in func.namespace:
            before, after = ([t.nbytes for t in tree_leaves(each) if isinstance(t, Tensor)] for each in (args, result))
            for kind in (GATHER, SCATTER, REDUCE):
                if kind.replace("-", "") in name:
                    self.step[kind] += sum(before) if kind == REDUCE else max(before + after)
        return result


def can_run(name: str) -> bool:
    """Whether torchao is installed, and PyTorch multiplies in its float8 on the CPU, if the setup is in float8."""
    return "float8" not in name or (HAS_TORCHAO and ("by_rows" not in name or training.multiplies_by_rows()))


def setup_of(folder: Path, options: dict[str, Any]) -> Setup:
    return training.setup_of(folder, ranks=RANKS, **options)


def work(rank: int, folder: str, names: list[str]) -> None:
    """One of the ranks: trains with these setups, and writes the bytes that it counted."""
    # No GPU is needed to multiply in float8 as one does.
    training.techniques.check = lambda setup: None  # type: ignore[assignment]
    counted = {}
    for name, options in SETUPS.items():
        if name not in names or not can_run(name):
            continue
        counting = Counting()
        training.auto_checkpoint.observers = lambda *_, counting=counting: [counting]  # type: ignore[assignment,misc]
        with counting:
            training.trained(setup_of(Path(folder) / "model", options))
        counted[name] = counting.second
    (Path(folder) / f"{rank}.json").write_text(json.dumps(counted))


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the model, and setup → collective → bytes."""
    folder = tmp_path_factory.mktemp("counted")
    training.saved_model(folder / "model", num_key_value_heads=4)
    forks.on_ranks(RANKS, work, str(folder), forks.cases(request, "name"))
    return folder / "model", json.loads((folder / "0.json").read_text())


@pytest.mark.slow
@pytest.mark.cpu
@training.needs_distributed
@pytest.mark.parametrize("name", SETUPS)
def test_the_formula_gives_the_bytes_of_the_collectives_of_a_step(
    name: str, counted: tuple[Path, dict[str, Any]]
) -> None:
    folder, bytes_of = counted
    if not can_run(name):
        pytest.skip("needs torchao, and with one scale per row a PyTorch that multiplies so on the CPU")
    parameters = 78_144
    formula: Counter[str] = Counter()
    for exchange in exchanges(setup_of(folder, SETUPS[name]), parameters, parameters):
        formula[exchange.kind] += round(exchange.size)
    # Norms of gradients, numbers of tokens and losses are a few bytes.
    assert {kind: size for kind, size in bytes_of[name].items() if size > 1000} == pytest.approx(
        {kind: size for kind, size in formula.items() if size}, rel=1e-3
    )


def test_each_machine_receives_the_parts_of_the_others_once() -> None:
    assert LARGE.received(per_machine=64) == pytest.approx((7e9 * 63 / 64, 0))
    within, network = LARGE.received(per_machine=8)
    assert network * 8 == pytest.approx(7e9 * 7 / 8)
    assert within + network == pytest.approx(7e9 * 63 / 64)
    # One rank of each machine, as beside tensor parallelism over a machine.
    assert replace(LARGE, ranks=8, stride=8).received(per_machine=8) == pytest.approx((0, 7e9 * 7 / 8))
    assert replace(LARGE, kind=REDUCE).received(per_machine=8) == pytest.approx((2 * within, 2 * network))


def test_hybrid_sharding_sends_only_gradients_over_the_network() -> None:
    setup = Setup("llama-3.2-1b", ranks=16, shard="fsdp2", replicate=2)
    over_the_network = [each.what for each in exchanges(setup, 10**9, 10**9) if each.received(8)[1]]
    assert over_the_network == [GRADIENTS]


def test_host_memory_holds_a_copy_of_the_shards_while_they_are_written() -> None:
    setup = Setup("llama-3.2-1b", ranks=16, shard="fsdp2")
    assert checkpoint_bytes(setup, 700, 10**9, per_machine=8) == 8 * 700
    offloaded = replace(setup, offload="parameters")
    assert checkpoint_bytes(offloaded, 0, 10**9, per_machine=8) == 8 * 12 * 10**9 // 16
    assert checkpoint_bytes(replace(setup, shard="zero3"), 700, 10**9, per_machine=8) == 0


def test_host_memory_holds_what_is_offloaded() -> None:
    setup = Setup("llama-3.2-1b", ranks=16, shard="zero3")
    assert host_bytes(setup, 10**9, 10**9, per_machine=8) == 0
    assert host_bytes(replace(setup, offload="optimizer"), 10**9, 10**9, per_machine=8) == 8 * 10**9
    inputs = host_bytes(replace(setup, checkpoint="offload"), 10**9, 10**9, per_machine=8)
    assert inputs == 8 * 1024 * 2048 * 16 * 2
