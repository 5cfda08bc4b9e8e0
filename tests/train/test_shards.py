# SPDX-License-Identifier: Apache-2.0
"""Two ranks train with Liger by every way of sharding to the losses of plain data parallelism without it; those of
`--precision fp8` to the losses of one process."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import forks
from hf.two_ranks import on_two_ranks
from liger_train import checkpointing, combinations, compiling, model, techniques, zero
from liger_train.model import build
from liger_train.runs.run import run
from liger_train.setup import Setup
from liger_train.sharded_loading import SHARD
from train.training import STEPS, Trained, multiplies_by_rows, needs_distributed, saved_model, setup_of, trained

pytestmark = [pytest.mark.slow, pytest.mark.cpu, needs_distributed]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
# With Liger, but for what they are compared with. One way of each library also computes layers again.
WAYS: dict[str, dict[str, Any]] = {
    "none": {"liger": "none"},
    "none-full": {"checkpoint": "full"},
    # Before FSDP2, which accelerate remembers in the environment.
    "tp": {"tp": 2, "checkpoint": "full"},
    "tp-compile": {"tp": 2, "checkpoint": "full", "compile": "default"},
    "fsdp2": {"shard": "fsdp2", "checkpoint": "full", "mlp": "tiled"},
    "fsdp2-bf16": {"shard": "fsdp2", "precision": "bf16"},
    "fsdp2-compile": {"shard": "fsdp2", "checkpoint": "1", "compile": "default"},
    "cp": {"cp": 2, "shard": "fsdp2", "checkpoint": "full"},
    "fsdp2-offload-parameters": {"shard": "fsdp2", "offload": "parameters"},
    "zero1": {"shard": "zero1", "checkpoint": "full", "mlp": "tiled"},
    "zero2-offload-optimizer": {"shard": "zero2", "offload": "optimizer", "mlp": "tiled"},
    "zero3-offload-parameters": {"shard": "zero3", "offload": "parameters", "checkpoint": "full"},
}


checkpointing_enable = checkpointing.enable
# Two ranks need a GPU each.
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = ["cpu", pytest.param("cuda", marks=two_gpus)]


def enable(model: Any, how: str) -> None:
    """As `--checkpoint auto` may leave the layers: the first one keeps its input, the last one also what products give."""
    checkpointing_enable(model, how)
    if how == "full":
        checkpointing.keep(checkpointing.layers(model)[-1], checkpointing.Keeps.MATMULS)


def ways(device: str, chosen: list[str]) -> dict[str, dict[str, Any]]:
    """FSDP2 pins host memory for a GPU, and ring attention on GPUs does not support float32."""
    other = "cp" if device == "cuda" else "fsdp2-offload-parameters"
    return {way: options for way, options in WAYS.items() if way in chosen and way != other}


def work(rank: int, folder: str, device: str, chosen: list[str]) -> None:
    """One process: these ways, one after the other; writes the losses."""
    if device == "cuda":
        # For all ways: FSDP2 sums norms of gradients that are offloaded on the host.
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group("cuda:nccl,cpu:gloo")
    # It would compile for most of a minute; tests/train/techniques_that_compile.py lets it.
    zero.adam_problem = lambda: "not compiled in this test"  # type: ignore[assignment]
    checkpointing.enable = enable
    # Inductor compiles for half a minute on the CPU.
    compiling.COMPILER = "aot_eager"
    # A batch has 32 tokens.
    model.MLP_ROWS = 12
    losses: dict[str, list[float]] = {}
    for way, options in ways(device, chosen).items():
        if HAS_DEEPSPEED or "zero" not in way:
            setup = setup_of(Path(folder) / "model", ranks=2, device=device, **({"liger": "all"} | options))
            done = trained(setup)
            is_there(way, done)
            losses[way] = done.losses
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(losses))


def four(rank: int, folder: str) -> None:
    """One of four processes: two copies of the model, each on two ranks; or two ranks of tensor parallelism, and over
    them FSDP2 on other sequences, or on the other half of each."""
    found = {}
    ways: dict[str, tuple[int, dict[str, Any]]] = {"hybrid": (2, {"replicate": 2})}
    if not combinations._transformers_shards_both():
        ways |= {"dp": (4, {"tp": 2, "compile": "default"}), "cp": (4, {"tp": 2, "cp": 2, "checkpoint": "full"})}
    for name, (shards, options) in ways.items():
        done = trained(setup_of(Path(folder) / "model", ranks=4, shard="fsdp2", liger="all", **options))
        weight = done.built.model.model.layers[0].mlp.up_proj.weight
        assert weight.to_local().numel() * shards == weight.numel()
        losses = torch.tensor(done.losses)
        torch.distributed.all_reduce(losses)
        found[name] = (losses / 4).tolist()
    (Path(folder) / f"four{rank}.json").write_text(json.dumps(found))


def is_there(way: str, trained: Trained) -> None:
    """The way was gone, and nothing fell back to every rank holding everything."""
    wrapped, weight = trained.trainer.model_wrapped, trained.built.model.model.layers[0].mlp.up_proj.weight
    if way.startswith("none"):
        assert not wrapped._get_ddp_logging_data().get("has_rebuilt_buckets")
    if way.startswith("fsdp2"):
        assert type(weight).__name__ == "DTensor"
        assert weight.to_local().numel() * 2 == weight.numel()
    if way.endswith("compile"):
        assert torch._dynamo.utils.counters["frames"]["ok"] >= (1 if way.startswith("tp") else 2)
        assert not torch._dynamo.utils.counters["graph_break"]
    if way.startswith("zero"):
        assert wrapped.zero_optimization_stage() == int(way[4])
        assert (weight.numel() == 0) == (way[4] == "3")
        device = wrapped.zero_offload_optimizer()
        assert (device is not None and str(device.device) == "cpu") == ("offload" in way)
        assert (wrapped.zero_offload_param() is not None) == way.endswith("parameters")
    if way.startswith("tp"):
        head = trained.built.model.lm_head.weight
        assert all(w.to_local().untyped_storage().nbytes() * 2 == w.numel() * w.itemsize for w in (weight, head))


@pytest.fixture(scope="module", params=DEVICES, ids=["gloo", "nccl"])
def losses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    """By rank: way → losses."""
    folder = tmp_path_factory.mktemp("shards")
    saved_model(folder / "model")
    on_two_ranks(work, str(folder), request.param, ["none", *forks.cases(request, "way")])
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", [pytest.param(way, marks=[needs_deepspeed] if "zero" in way else []) for way in WAYS])
def test_a_sharded_run_has_the_losses_of_an_unsharded_one(way: str, losses: list[dict[str, list[float]]]) -> None:
    if way not in losses[0]:
        pytest.skip("not supported on this device")
    plain = losses[0]["none"]
    assert len(plain) == STEPS
    assert plain[-1] < plain[0], "it does not learn"
    found = [of_rank[way] for of_rank in losses]
    if way == "cp":
        # All sequences are alike, but not their halves.
        assert found[0] != pytest.approx(found[1], rel=1e-2)
        found = [[sum(step) / len(step) for step in zip(*found, strict=True)]]
    for each in found:
        assert each == pytest.approx(plain, rel=2e-2 if way == "fsdp2-bf16" else 1e-4)
        assert way != "fsdp2-bf16" or torch.tensor(each).bfloat16().tolist() != each, "it is rounded"


def test_copies_and_data_and_context_parallelism_over_tensor_parallelism_have_the_losses_of_one_process(
    tmp_path: Path,
) -> None:
    saved_model(tmp_path / "model")
    expected = trained(setup_of(tmp_path / "model", liger="all")).losses
    forks.on_ranks(4, four, str(tmp_path))
    for rank in range(4):
        for losses in json.loads((tmp_path / f"four{rank}.json").read_text()).values():
            assert losses == pytest.approx(expected, rel=1e-4)


CPU = torch.device("cpu")
# Precision → how far losses may be from those of one process. Sequences are alike, so scales are the same, and the
# first loss, too. Later ones differ by the rounding of gradients, which ranks sum in another order: in bfloat16, or to
# float8. In fp8, one process keeps float32 between matmuls on the CPU, and FSDP2 bfloat16, as above.
TOLERANCES = {"fp8-pure": 1e-3, "fp8-rowwise-pure": 1e-3, "fp8": 2e-2}
if not multiplies_by_rows():
    del TOLERANCES["fp8-rowwise-pure"]


def sharded(folder: Path, **options: Any) -> Setup:
    return setup_of(folder / "model", ranks=2, shard="fsdp2", **options)


def in_float8(rank: int, folder: Path) -> None:
    """One of two ranks: writes the losses of every precision, and checks the weights before and after."""
    start(rank)
    losses = {}
    for precision in TOLERANCES:
        done = trained(sharded(folder, precision=precision, liger="all", checkpoint="full"))
        losses[precision] = done.losses
        for name, weight in done.built.model.named_parameters():
            is_cast = name.endswith("_proj.weight") and "rowwise" not in precision
            assert (type(weight.to_local()) is not torch.Tensor) == is_cast, (precision, name)
            if is_cast:
                check_scale(weight)
    check_loaded(rank, sharded(folder, precision="fp8"))
    (folder / f"{rank}.json").write_text(json.dumps(losses))


def start(rank: int) -> None:
    # No GPU is needed to multiply as one does.
    techniques.check = lambda setup: None  # type: ignore[assignment]


def check_scale(weight: Any) -> None:
    """Raises unless the scale for the next step is the one of the whole weight."""
    shard = weight.to_local()
    most = shard._tensor.abs().max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert weight._local_tensor._precomputed_scale == (torch.finfo(torch.float8_e4m3fn).max / most.double()).float()


def check_loaded(rank: int, setup: Setup) -> None:
    """Raises unless each weight before training is the one of the files."""
    whole = dict(AutoModelForCausalLM.from_pretrained(setup.model).named_parameters())
    for name, weight in build(setup, CPU).model.named_parameters():
        shard = getattr(weight, SHARD)
        assert torch.equal(getattr(shard, "_tensor", shard), whole.pop(name).chunk(2)[rank]), name
    assert not whole


def odd(rank: int, folder: Path) -> None:
    """One of three ranks, over which rows are not divisible."""
    start(rank)
    done = trained(replace(sharded(folder, precision="fp8-pure"), ranks=3))
    weights = dict(done.built.model.model.layers[0].named_parameters())
    kinds = {name.split(".")[1]: type(weight.to_local()) is not torch.Tensor for name, weight in weights.items()}
    assert [name for name, is_cast in kinds.items() if is_cast] == ["gate_proj", "up_proj"]
    (folder / f"odd{rank}.json").write_text(json.dumps(done.losses))


def saving(rank: int, folder: Path, small: Setup) -> None:
    """One of two ranks: a run, and another one that is continued."""
    start(rank)
    setup = replace(small, ranks=2, shard="fsdp2", precision="fp8", steps=4)
    for name, setups in {"whole": [setup], "parts": [replace(setup, steps=2), setup]}.items():
        for each in setups:
            export = folder / f"exported-{name}-{each.steps}"
            row = run(each, folder=folder / name, resume=len(setups) > 1, export=export)
            assert not row.failed, row.reason
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(row.columns()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchao")
    folder = tmp_path_factory.mktemp("float8")
    saved_model(folder / "model")
    return folder


@pytest.fixture
def one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the losses of one process with as many sequences."""
    monkeypatch.setattr(techniques, "check", lambda setup: None)
    return lambda ranks=2, **options: trained(replace(setup_of(folder / "model", **options), batch=2 * ranks)).losses


def test_two_ranks_have_the_losses_of_one_process(folder: Path, one_process: Any) -> None:
    on_two_ranks(in_float8, folder)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for precision, tolerance in TOLERANCES.items():
        expected = one_process(precision=precision, liger="all")
        assert len(expected) == STEPS
        for losses in ranks:
            assert losses[precision] == pytest.approx(expected, rel=tolerance), precision
            assert losses[precision][0] == expected[0] or precision == "fp8"


def test_a_weight_whose_rows_are_not_divisible_is_gathered_in_bfloat16(folder: Path, one_process: Any) -> None:
    forks.on_ranks(3, odd, folder)
    # All have the gradients of these two sequences. Of six, each would be a third, with other roundings.
    expected = one_process(ranks=1, precision="fp8-pure")
    for rank in range(3):
        losses = json.loads((folder / f"odd{rank}.json").read_text())
        assert losses == pytest.approx(expected, rel=TOLERANCES["fp8-pure"])


def test_a_run_resumes_exactly_and_saves_plain_weights(
    folder: Path, small: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_two_ranks(saving, folder, small)
    whole, parts = (json.loads((folder / f"{name}.json").read_text()) for name in ("whole", "parts"))
    assert parts["losses"] == whole["losses"]
    assert whole["losses"][-1] < whole["losses"][0]
    assert any(note.startswith("Resumed from step 2") for note in parts["notes"])
    before, *after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (small.model, *(folder / name / "checkpoint-4" for name in ("whole", "parts")))
    )
    after.append(AutoModelForCausalLM.from_pretrained(folder / "exported-parts-4").state_dict())
    for name, weight in before.items():
        assert not torch.equal(weight, after[0][name])
        assert all(torch.equal(each[name], after[0][name]) for each in after)
    monkeypatch.setattr(techniques, "check", lambda setup: None)
    alone = run(replace(small, batch=4, steps=5, precision="fp8"), folder=folder / "parts", resume=True)
    assert alone.losses is not None, alone.reason
    assert alone.losses[:4] == whole["losses"]
    assert alone.losses[4] < whole["losses"][-1]
