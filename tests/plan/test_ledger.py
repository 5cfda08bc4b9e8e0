# SPDX-License-Identifier: Apache-2.0
"""The ledger of a step: allocations, releases and their categories, what fused losses and optimizers take, and which
backend would allocate it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_bench.memory import held_bytes, peak_bytes
from liger_core import OptionError, linear_cross_entropy, linear_log_prob, swiglu
from liger_core.kernels import plain_matmuls
from liger_core.ops import _token_passes
from liger_core.ops.head import loop
from liger_core.plugins import registry
from liger_train.plan import devices
from liger_train.plan.devices import choosing_as_on
from liger_train.plan.ledger import GRADIENTS, OTHER, WEIGHTS, Ledger
from liger_train.plan.optimizers import OPTIMIZERS, weights_of
from liger_train.plan.step import as_option_error
from liger_train.runs.arguments import training_arguments
from liger_train.setup import Setup
from liger_train.techniques import TECHNIQUES
from plan.measuring import tiny
from test_selection import THIRD
from train.training import fail_in_a_checkpoint

KiB = 1024


def floats(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32)


def test_the_peak_is_when_most_is_held() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        first = floats(KiB)
        ledger.doing = "most"
        second = floats(2 * KiB)
        del first
        ledger.doing = "after"
        third = floats(512)
    assert (ledger.peak().total, ledger.peak().doing) == (12 * KiB, "most")
    assert ledger.end().total == second.nbytes + third.nbytes


def test_views_and_in_place_operations_hold_nothing() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        x = floats(KiB)
        x.view(2, -1).t().mul_(2.0)
    assert ledger.peak().total == 4 * KiB


def test_sizes_are_those_of_cuda_blocks() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        kept = floats(1)
    assert ledger.peak().total == 512
    assert kept.nbytes == 4


def test_a_label_that_comes_late_holds_from_the_beginning() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        x = floats(KiB)
        y = floats(KiB)
        ledger.record(y, GRADIENTS)
    assert ledger.peak().held == {OTHER: 4 * KiB, GRADIENTS: 4 * KiB}
    assert x.shape == y.shape


def test_what_an_operation_holds_inside_counts_while_it_runs() -> None:
    ledger = Ledger(workspace=lambda func, args, kwargs: 8 * KiB if func is torch.ops.aten.mul.Tensor else 0)
    with FakeTensorMode(), ledger:
        x = floats(KiB)
        y = x * x
    assert ledger.peak().total == 16 * KiB
    assert ledger.end().total == x.nbytes + y.nbytes


def test_what_moves_away_is_held_no_longer() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        x = floats(KiB)
        ledger.record(x, WEIGHTS)
        ledger.move(x, 3 * KiB)
        ledger.begin()
        del x
    assert (ledger.static, ledger.end().total) == (KiB, 0)


def test_the_ledger_agrees_with_torchs_own_tracker() -> None:
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    mode = FakeTensorMode()
    with mode:
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        x = torch.randn(512, 256)
    ledger, theirs = Ledger(), tracker.MemTracker()
    theirs.track_external(model, x)
    for watch in (ledger, theirs):
        model.zero_grad()
        with mode, watch:
            for tensor in (*model.parameters(), x) if watch is ledger else ():
                ledger.record(tensor)
            model(x).square().sum().backward()
    expected = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert ledger.peak().total == pytest.approx(expected, rel=0.001)


CPU = torch.device("cpu")
ROWS, WIDTH, CLASSES = 192, 256, 4000
# Of several chunks, whose gradients of the weight are summed in float32, but in bfloat16 within the budget.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "sum": partial(linear_cross_entropy, reduction="sum", chunk=64),
    "each row": partial(linear_cross_entropy, reduction="none", chunk=64),
    "log-probabilities": partial(linear_log_prob, chunk=64),
    "log-probabilities, kept": linear_log_prob,
    "each row, within a budget": partial(linear_cross_entropy, reduction="none", budget=512 << 10),
}
NEEDS = {"both": (True, True), "frozen head": (True, False), "only the head": (False, True)}


def inputs(needs: tuple[bool, bool]) -> list[Tensor]:
    hidden = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=needs[0])
    weight = torch.zeros(CLASSES, WIDTH, dtype=torch.bfloat16, requires_grad=needs[1])
    return [hidden, weight, torch.zeros(ROWS, dtype=torch.long)]


def step(loss: Callable[..., Tensor], given: list[Tensor]) -> object:
    return torch.autograd.grad(loss(*given).sum(), [t for t in given if t.requires_grad])


@pytest.mark.slow
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_plan_counts_the_memory_of_a_loss(
    loss: Callable[..., Tensor], needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_token_passes, loop):
        monkeypatch.setattr(module, "REFERENCE_BLOCK", 4 * CLASSES)
    # On a CPU that multiplies matrices of bfloat16 itself, oneDNN copies them into buffers of its own first. On one that
    # does not, references multiply tiles in float32, whose few megabytes a plan leaves out.
    with torch.backends.mkldnn.flags(enabled=False), plain_matmuls():
        measured = peak_bytes(partial(step, loss, inputs(needs)), CPU, collect=False)
    ledger = Ledger(partial(devices.replace, "cpu"), partial(devices.workspace, "cpu"))
    with FakeTensorMode(), devices.emulating("cpu"):
        given = inputs(needs)
        for tensor in given:
            ledger.record(tensor, WEIGHTS)
        with ledger:
            ledger.begin()
            step(loss, given)
    assert ledger.peak().total - ledger.static == pytest.approx(measured, rel=0.02)


X = torch.randn(4, 8)
BACKEND = THIRD.replace("DEVICES", "('cuda',)").replace("PRIORITY", "1000")

Install = Callable[[str, str], Path]


def test_cpu_tensors_stand_in_for_those_of_a_gpu(install: Install) -> None:
    install("third", BACKEND)
    with choosing_as_on("cuda", "cpu") as backends:
        assert backends[-1] == "third"
        assert torch.equal(swiglu(X, X), swiglu.reference(X, X) + 1)
    assert torch.equal(swiglu(X, X), swiglu.reference(X, X))


def test_what_stands_in_need_not_be_able_to_run(install: Install) -> None:
    """Where there is no GPU, Triton's backend is unavailable, but what it would allocate is known."""
    install("third", BACKEND.replace("table, supports", "table, unavailable=lambda: 'broken', supports"))
    assert "third" in registry().unavailable
    with choosing_as_on("cuda", "cpu"):
        assert torch.equal(swiglu(X, X), swiglu.reference(X, X) + 1)


def test_a_backend_without_fake_tensors_does_not_stand_in(install: Install) -> None:
    install("third", BACKEND.replace("tensors=True", "tensors=False"))
    with choosing_as_on("cuda", "cpu") as backends:
        assert "third" not in backends


# Compiled for minutes, for a GPU, or without a state that could be looked at.
UNSEEN = (
    "adamw-torchao-8bit", "adamw-torchao-4bit", "galore-8bit", "galore-layerwise", "paged-adamw", "paged-adamw-8bit",
)  # fmt: skip


class Small(nn.Module):
    """An embedding, a linear layer wide enough for a projection, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 256)
        self.layer = nn.Linear(256, 512)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(input_ids)).square().mean()


def test_every_optimizer_of_train_has_a_size() -> None:
    assert OPTIMIZERS.keys() == TECHNIQUES["optimizer"].keys()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in UNSEEN])
def test_the_memory_of_an_optimizer_is_as_predicted(name: str, tmp_path: Path) -> None:
    for package in TECHNIQUES["optimizer"][name].packages:
        pytest.importorskip(package.replace("-", "_"))
    from transformers import Trainer

    model = Small()
    trainer = Trainer(model=model, args=training_arguments(tiny(optimizer=name), tmp_path))
    trainer.create_optimizer()
    model(torch.arange(8)).backward()
    trainer.optimizer.step()
    values = [value for of in trainer.optimizer.state.values() for value in of.values()]
    state = [vars(value) if hasattr(value, "ortho_matrix") else value for value in values]
    tensors = [t for v in state for t in (v.values() if isinstance(v, dict) else [v]) if isinstance(t, torch.Tensor)]
    said = sum(map(OPTIMIZERS[name].state, weights_of(model)))
    held = held_bytes(tensors)
    # Sizes are said in blocks.
    assert 0.99 * held <= said <= 1.01 * held + 512 * len(tensors)


def test_a_plan_that_fails_within_a_checkpointed_layer_leaves_no_hooks() -> None:
    with pytest.raises(OptionError, match="ValueError: no such index") as failed, as_option_error(Setup("tiny")):
        fail_in_a_checkpoint(ValueError("no such index"))
    # Also while the error, and so its traceback, is still there.
    torch.ones(1, requires_grad=True).square().backward()
    del failed
