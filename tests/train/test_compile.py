# SPDX-License-Identifier: Apache-2.0
"""`--compile`: compiled layers and CUDA graphs train to the losses of eager mode, and are refused or given up with a
reason."""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import liger_core
from liger_core.private_torch import CompilerError
from liger_train import checkpointing, combinations, compiling
from liger_train.model import build
from liger_train.runs.command import _figures
from liger_train.runs.graphs import Graphs
from liger_train.runs.run import run
from liger_train.setup import Setup
from train.training import fail_in_a_checkpoint

pytestmark = pytest.mark.slow

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Dynamo and AOTAutograd trace as always; Inductor, which takes half a minute on the CPU, is left to tests on a GPU
    and to techniques_that_compile.py.
    """
    if "inductor" not in request.fixturenames:
        monkeypatch.setattr(compiling, "COMPILER", "aot_eager")
    yield
    torch._dynamo.reset()


@pytest.fixture
def inductor() -> None:
    """Named by the tests that compile with it."""


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": 2, "checkpoint": "full", "validation": 0.1}, {"checkpoint": "1", "liger": "none"},
        {"precision": "bf16"},
    ],
    ids=str,
)  # fmt: skip
def test_compiled_layers_train_to_the_losses_of_eager_mode(small: Setup, options: dict[str, Any]) -> None:
    setup = replace(small, steps=3, **options)
    eager, compiled = run(setup), run(replace(setup, compile="default"))
    assert compiled.reason == ""
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-2 if setup.precision == "bf16" else 1e-5)
    assert compiled.validation_loss == (pytest.approx(eager.validation_loss, rel=1e-5) if setup.validation else None)
    assert eager.compile_seconds is None
    assert compiled.compile_seconds > 0
    assert _figures(compiled)["compile time"].endswith(" s")
    assert any("--compile default: compiling took" in note for note in compiled.notes)


def test_inductor_does_not_write_out_what_custom_ops_are_computed_from(
    inductor: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The text grows exponentially with the number of ops: 162 s in a layer of Llama 3 8B with LoRA."""
    monkeypatch.setenv(compiling.CACHE, str(tmp_path))
    x, a, b = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8, 2)

    def ops(x: Tensor) -> Tensor:
        return liger_core.lora_linear(liger_core.lora_linear(x, None, a, b, 1.0, base=x), None, a, b, 1.0, base=x)

    with compiling.session(), caplog.at_level("INFO", logger="torch._inductor.graph"):
        torch.compile(ops)(x)
    fallbacks = [record.getMessage() for record in caplog.records if "fallback" in record.getMessage()]
    assert len(fallbacks) >= 2
    assert not any("args[" in text for text in fallbacks)


def test_compiled_layers_recompute_what_they_recompute_in_eager_mode(small: Setup) -> None:
    """Moved while the run proceeds, as --checkpoint auto moves them."""
    model = build(replace(small, compile="default", checkpoint="full"), torch.device("cpu")).model
    tokens, losses = torch.zeros(2, 16, dtype=torch.int64), []
    with compiling.session():
        for keeps in (*checkpointing.Keeps, checkpointing.Keeps.INPUT):
            for layer in checkpointing.layers(model):
                checkpointing.keep(layer, keeps)
            model.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append((float(loss), float(model.model.layers[0].mlp.up_proj.weight.grad.sum())))
    assert len(set(losses)) == 1


def test_a_compiled_layer_does_not_recompute_its_last_matmul(small: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def matmuls(graph: Any, inputs: Any) -> Any:
        counts.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(compiling, "COMPILER", aot_autograd(fw_compiler=matmuls, bw_compiler=matmuls))
    counts: list[int] = []
    row = run(replace(small, steps=2, compile="default", checkpoint="full", precision="fp32"))
    assert row.reason == ""
    # The seven linear layers of a layer; two gradients of each, and all but down_proj again.
    assert counts == [7, 2 * 7 + 6]


def test_a_compiler_that_fails_leaves_the_layers_in_eager_mode(small: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such instruction")

    monkeypatch.setattr(compiling, "COMPILER", broken)
    setup = replace(small, steps=3)
    eager, compiled = run(setup), run(replace(setup, compile="default"))
    assert compiled.losses == eager.losses
    assert "--compile: the layers run in eager mode, since the compiler failed: no such instruction" in compiled.notes


def test_a_compiler_that_fails_within_a_checkpointed_layer_leaves_no_hooks() -> None:
    model, reasons = nn.Linear(1, 1), list[str]()

    def step() -> bool:
        if not reasons:
            fail_in_a_checkpoint(CompilerError()("no such instruction"))
        model(torch.ones(1)).square().backward()
        return True

    assert compiling.or_eagerly(step, model, reasons.append)
    assert reasons == ["no such instruction"]


def test_compiled_graphs_are_kept_for_later_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for set_by_torch in ("", str(Path(tempfile.gettempdir()) / "torchinductor_someone")):
        monkeypatch.setenv(compiling.CACHE, set_by_torch)
        with compiling.session():
            assert os.environ[compiling.CACHE] == str(tmp_path / "liger" / "compiled")
    monkeypatch.setenv(compiling.CACHE, "/my/own")
    assert compiling.cache() == "/my/own"


def test_compiling_for_the_cpu_needs_a_compiler(small: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    problem = combinations.compiled(replace(small, compile="default"))
    assert problem.startswith("needs a C++ compiler on the CPU, not installed here; ")
    assert combinations.compiled(replace(small, compile="default", device="cuda")) == ""


class StandIn:
    """Records as a GPU does: nothing is computed meanwhile, and a replay computes from and into the same memory."""

    def __init__(self, model: nn.Module, *, waits: bool = False, draws: bool = False, fails: bool = False) -> None:
        self.model, self.waits, self.draws, self.fails = model, waits, draws, fails
        self.recordings = self.replays = 0

    def rehearse(self, step: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        loss = step()
        if self.waits:
            fail_in_a_checkpoint(RuntimeError("called a synchronizing CUDA operation\nmore"))
        return loss, self.draws

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        if self.fails:
            fail_in_a_checkpoint(RuntimeError("operation not permitted when stream is capturing"))
        self.recordings += 1
        weights = list(self.model.parameters())
        before = [None if weight.grad is None else weight.grad.clone() for weight in weights]
        loss = step()
        made = [weight.grad for weight in weights]
        for old, new in zip(before, made, strict=True):
            new.copy_(old if old is not None else torch.full_like(new, torch.nan))

        def replay() -> None:
            self.replays += 1
            for weight, old, new in zip(weights, before, made, strict=True):
                weight.grad = None if old is None else new
            loss.copy_(step())
            for weight, new in zip(weights, made, strict=True):
                if weight.grad is not new:
                    new.copy_(weight.grad)
                # The optimizer sees only what the graph wrote.
                weight.grad = None

        return replay, loss.fill_(torch.nan)


class Training:
    """Steps of plain gradient descent on a model of one matrix, with as many micro-batches as sizes are given."""

    def __init__(self, sizes: tuple[int, ...], graphs: bool, place: str = "cpu", **faults: bool) -> None:
        torch.manual_seed(0)
        self.sizes, self.place, self.model = sizes, place, nn.Linear(4, 3).to(place)
        self.notes: list[str] = []
        self.losses: list[float] = []
        self.device = StandIn(self.model, **faults)
        self.step = 0
        recorder = self.device if place == "cpu" else None
        eager: Any = lambda inputs, tokens: self._micro(inputs["x"], tokens)  # noqa: E731
        done = lambda: self.step >= 2  # noqa: E731
        self.run = Graphs(eager, self.model, done, self.notes.append, device=recorder) if graphs else eager

    def _micro(self, x: Tensor, tokens: Any) -> Tensor:
        loss = self.model(x).square().sum() / tokens
        loss.backward()
        return loss.detach()

    def train(self, steps: int = 8) -> "Training":
        for self.step in range(1, steps + 1):
            self.one()
        return self

    def one(self) -> None:
        tokens: Any = torch.tensor(sum(self.sizes)) if self.step % 2 else sum(self.sizes) + 1
        inputs = [torch.full((size, 4), 0.1 * self.step + i, device=self.place) for i, size in enumerate(self.sizes)]
        losses = [self.run({"x": x}, tokens) for x in inputs]
        self.losses += [float(loss) for loss in losses]
        with torch.no_grad():
            for weight in self.model.parameters():
                weight -= 0.01 * weight.grad
        self.model.zero_grad()


@pytest.mark.parametrize(
    ("sizes", "recordings", "replays"),
    [((2,), 1, 6), ((2, 2), 2, 12), ((2, 2, 2), 2, 18), ((3, 3, 2), 3, 18)],
    ids=["one micro-batch", "accumulation", "more accumulation", "parts of different sizes"],
)
def test_graphs_train_to_the_losses_of_eager_mode(sizes: tuple[int, ...], recordings: int, replays: int) -> None:
    eager, graphs = Training(sizes, graphs=False).train(), Training(sizes, graphs=True).train()
    assert graphs.losses == eager.losses
    for weight, expected in zip(graphs.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=0)
    assert graphs.notes == []
    assert graphs.device.recordings == recordings
    # The second step rehearses in its first micro-batch; others of that step run as usual.
    assert graphs.device.replays == replays


def test_a_first_micro_batch_of_another_shape_runs_as_usual() -> None:
    eager, graphs = Training((2, 2), graphs=False).train(6), Training((2, 2), graphs=True).train(6)
    for training in (eager, graphs):
        # The other micro-batch of 3 is recorded while the gradients of the first one are not yet in the memory of the
        # graphs.
        for training.sizes in ((3, 2), (2, 2), (3, 3), (3, 3)):
            training.one()
    assert graphs.losses == eager.losses


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("waits", "a step must not wait for the GPU, but one does: called a synchronizing CUDA operation"),
        ("fails", "operation not permitted when stream is capturing"),
    ],
)
def test_what_cannot_be_recorded_continues_as_usual_with_the_reason(fault: str, reason: str) -> None:
    eager, graphs = Training((2, 2), graphs=False).train(), Training((2, 2), graphs=True, **{fault: True}).train()
    assert graphs.losses == eager.losses
    assert graphs.notes == [f"--compile graphs: training continues without CUDA graphs: {reason}."]
    assert graphs.device.replays == 0


def test_weights_that_moved_end_the_graphs() -> None:
    eager, graphs = Training((2, 2), graphs=False).train(), Training((2, 2), graphs=True).train()
    for training in (eager, graphs):
        training.model.weight.data = training.model.weight.data.clone()
        training.train(2)
    assert graphs.losses == eager.losses
    assert ["must stay at their addresses" in note for note in graphs.notes] == [True]


@pytest.mark.parametrize("draws", [False, True])
def test_recomputed_layers_may_draw_no_random_numbers_in_a_graph(draws: bool, small: Setup) -> None:
    model = build(replace(small, checkpoint="full"), torch.device("cpu")).model
    notes: list[str] = []

    def step(inputs: Any, tokens: Any) -> Tensor:
        loss: Tensor = model(**inputs).loss
        loss.backward()
        return loss.detach()

    graphs = Graphs(step, model, lambda: True, notes.append, device=StandIn(model, draws=draws))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    for _ in range(2):
        graphs({"input_ids": tokens, "labels": tokens}, None)
        model.zero_grad()
    assert bool(notes) == draws
    assert all("draw random numbers" in note for note in notes)
    options = [layer._gradient_checkpointing_func.keywords for layer in checkpointing.layers(model)]
    kept = [each.get("preserve_rng_state", True) for each in options]
    assert kept == [draws, draws]


def test_layers_with_offloaded_inputs_run_without_graphs(small: Setup) -> None:
    model = build(replace(small, checkpoint="full"), torch.device("cpu")).model
    checkpointing.layers(model)[0]._gradient_checkpointing_func = lambda function, *args: function(*args)
    notes: list[str] = []
    recorder = StandIn(model)
    graphs = Graphs(lambda inputs, tokens: model(**inputs).loss, model, lambda: True, notes.append, device=recorder)
    graphs({"input_ids": torch.zeros(2, 16, dtype=torch.int64), "labels": torch.zeros(2, 16, dtype=torch.int64)}, None)
    assert ["offloaded inputs" in note for note in notes] == [True]


@cuda
@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize(
    "options",
    [
        {}, {"accumulation": 3}, {"checkpoint": "full"}, {"checkpoint": "auto", "steps": 16}, {"adapter": "lora"},
        {"precision": "bf16"}, {"precision": "fp16", "learning_rate": 1e-3}, {"liger": "none"}, {"validation": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_cuda_graphs_train_to_the_losses_of_eager_mode(small: Setup, options: dict[str, Any]) -> None:
    if options.get("adapter"):
        pytest.importorskip("peft")
    setup = replace(small, device="cuda", **({"steps": 10} | options))
    eager, graphs = run(setup), run(replace(setup, compile="graphs"))
    assert graphs.reason == ""
    assert not [note for note in graphs.notes if "without CUDA graphs" in note]
    assert graphs.losses == pytest.approx(eager.losses, rel=2e-2 if setup.precision != "fp32" else 1e-3)


@cuda
def test_dropout_draws_new_numbers_in_every_replay() -> None:
    model, notes = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda(), list[str]()

    def step(inputs: Any, tokens: Any) -> Tensor:
        loss: Tensor = model(inputs["x"]).square().sum() / tokens
        loss.backward()
        return loss.detach()

    graphs, losses = Graphs(step, model, lambda: True, notes.append), set()
    for _ in range(8):
        losses.add(float(graphs({"x": torch.ones(16, 64, device="cuda")}, 1)))
        model.zero_grad()
    assert len(losses) == 8
    assert notes == []


@cuda
def test_a_step_that_waits_for_the_gpu_runs_without_graphs() -> None:
    training = Training((2, 2), graphs=True, place="cuda")
    micro = training.run.step
    training.run.step = lambda inputs, tokens: micro(inputs, tokens) * float(inputs["x"].sum() > 0)
    expected = Training((2, 2), graphs=False, place="cuda").train().losses
    assert training.train().losses == pytest.approx(expected, rel=1e-5)
    assert [note for note in training.notes if "a step must not wait for the GPU, but one does: " in note]
