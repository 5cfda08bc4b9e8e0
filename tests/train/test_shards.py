# SPDX-License-Identifier: Apache-2.0
"""Two ranks train by every way of sharding to the losses of plain data parallelism, with Liger and without."""

from __future__ import annotations

import gc
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forks
from hf.two_ranks import on_two_ranks
from liger_train import checkpointing, combinations, compiling, model, zero
from train.training import STEPS, Trained, saved_model, setup_of, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
# One way of each library also computes layers again.
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "none-full": {"checkpoint": "full"},
    # Before FSDP2, which accelerate remembers in the environment.
    "tp": {"tp": 2, "checkpoint": "full"},
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
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
]


def enable(model: Any, how: str) -> None:
    """As `--checkpoint auto` may leave the layers: the first one keeps its input, the last one also what products give."""
    checkpointing_enable(model, how)
    if how == "full":
        checkpointing.keep(checkpointing.layers(model)[-1], checkpointing.Keeps.MATMULS)


def ways(device: str) -> dict[str, dict[str, Any]]:
    """FSDP2 pins host memory for a GPU, and ring attention on GPUs does not support float32."""
    return {
        way: options
        for way, options in WAYS.items()
        if way != ("cp" if device == "cuda" else "fsdp2-offload-parameters")
    }


def work(rank: int, folder: str, device: str) -> None:
    """One process: every way, with and without Liger, one after the other; writes the losses."""
    torch.set_num_threads(1)
    if device == "cuda":
        # For all ways: FSDP2 sums norms of gradients that are offloaded on the host.
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group("cuda:nccl,cpu:gloo")
    # As in conftest.py.
    gc.freeze()
    # It would compile for most of a minute; tests/train/techniques_that_compile.py lets it.
    zero.adam_problem = lambda: "not compiled in this test"  # type: ignore[assignment]
    checkpointing.enable = enable
    # Inductor compiles for half a minute on the CPU.
    compiling.COMPILER = "aot_eager"
    # A batch has 32 tokens.
    model.MLP_ROWS = 12
    losses: dict[str, dict[str, list[float]]] = {}
    for way, options in ways(device).items():
        if HAS_DEEPSPEED or "zero" not in way:
            setup = setup_of(Path(folder) / "model", ranks=2, device=device, **options)
            done = {liger: trained(replace(setup, liger=liger)) for liger in ("none", "all")}
            is_there(way, done["all"])
            losses[way] = {liger: of.losses for liger, of in done.items()}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


def four(rank: int, folder: str) -> None:
    """One of four processes: two copies of the model, each on two ranks; or two ranks of tensor parallelism, and over
    them FSDP2 on other sequences, or on the other half of each."""
    torch.set_num_threads(1)
    gc.freeze()
    found = {}
    ways: dict[str, tuple[int, dict[str, Any]]] = {"hybrid": (2, {"replicate": 2})}
    if not combinations._transformers_shards_both():
        ways |= {"dp": (4, {"tp": 2}), "cp": (4, {"tp": 2, "cp": 2, "checkpoint": "full"})}
    for name, (shards, options) in ways.items():
        done = trained(setup_of(Path(folder) / "model", ranks=4, shard="fsdp2", liger="all", **options))
        weight = done.built.model.model.layers[0].mlp.up_proj.weight
        assert weight.to_local().numel() * shards == weight.numel()
        losses = torch.tensor(done.losses)
        torch.distributed.all_reduce(losses)
        found[name] = (losses / 4).tolist()
    (Path(folder) / f"four{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def is_there(way: str, trained: Trained) -> None:
    """The way was gone, and nothing fell back to every rank holding everything."""
    wrapped, weight = trained.trainer.model_wrapped, trained.built.model.model.layers[0].mlp.up_proj.weight
    if way.startswith("none"):
        assert not wrapped._get_ddp_logging_data().get("has_rebuilt_buckets")
    if way.startswith("fsdp2"):
        assert type(weight).__name__ == "DTensor"
        assert weight.to_local().numel() * 2 == weight.numel()
    if way == "fsdp2-compile":
        assert torch._dynamo.utils.counters["frames"]["ok"] >= 2
        assert not torch._dynamo.utils.counters["graph_break"]
    if way.startswith("zero"):
        assert wrapped.zero_optimization_stage() == int(way[4])
        assert (weight.numel() == 0) == (way[4] == "3")
        device = wrapped.zero_offload_optimizer()
        assert (device is not None and str(device.device) == "cpu") == ("offload" in way)
        assert (wrapped.zero_offload_param() is not None) == way.endswith("parameters")
    if way == "tp":
        head = trained.built.model.lm_head.weight
        assert all(w.to_local().untyped_storage().nbytes() * 2 == w.numel() * w.itemsize for w in (weight, head))


@pytest.fixture(scope="module", params=DEVICES, ids=["gloo", "nccl"])
def losses(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, list[float]]]]:
    """By rank: way → liger → losses."""
    folder = tmp_path_factory.mktemp("shards")
    saved_model(folder / "model")
    on_two_ranks(work, str(folder), request.param)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", [pytest.param(way, marks=[needs_deepspeed] if "zero" in way else []) for way in WAYS])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_run_has_the_losses_of_an_unsharded_one(rank: int, way: str, losses: list[dict[str, Any]]) -> None:
    if way not in losses[rank]:
        pytest.skip("not supported on this device")
    plain = losses[rank]["none"]["none"]
    assert len(plain) == STEPS
    assert plain[-1] < plain[0], "it does not learn"
    for liger in ("none", "all"):
        found = [run[way][liger] for run in losses]
        if way == "cp":
            # All sequences are alike, but not their halves.
            assert found[0] != pytest.approx(found[1], rel=1e-2)
            found = [[sum(step) / len(step) for step in zip(*found, strict=True)]] * len(found)
        assert found[rank] == pytest.approx(plain, rel=2e-2 if way == "fsdp2-bf16" else 1e-4)


def test_copies_and_data_and_context_parallelism_over_tensor_parallelism_have_the_losses_of_one_process(
    tmp_path: Path,
) -> None:
    saved_model(tmp_path / "model")
    expected = trained(setup_of(tmp_path / "model", liger="all")).losses
    forks.on_ranks(4, four, str(tmp_path))
    for rank in range(4):
        for losses in json.loads((tmp_path / f"four{rank}.json").read_text()).values():
            assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_loss_of_a_sharded_run_in_bfloat16_is_not_rounded(rank: int, losses: list[dict[str, Any]]) -> None:
    reported = losses[rank]["fsdp2-bf16"]["all"]
    assert torch.tensor(reported).bfloat16().tolist() != reported
