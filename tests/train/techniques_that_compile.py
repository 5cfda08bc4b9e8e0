# SPDX-License-Identifier: Apache-2.0
"""Techniques whose libraries compile for half a minute when they are first used; `nox -s techniques` runs these."""

import gc
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from liger_train import zero
from train.training import saved_model, setup_of, trained, twice

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler, g++")


@pytest.fixture(autouse=True)
def nothing_of_another_training() -> None:
    """As long as accelerate's state has its settings, Transformers makes every model for ZeRO-3."""
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()


@pytest.mark.parametrize("bits", [4, 8])
def test_torchao_trains_with_liger_to_the_losses_without(bits: int, folder: Path, device: torch.device) -> None:
    pytest.importorskip("torchao")
    plain, liger = twice(setup_of(folder, device=device.type, optimizer=f"adamw-torchao-{bits}bit"))
    assert plain.losses[-1] < plain.losses[0]
    # A moment near the middle between two of its 16 values is rounded to either.
    exact = 1e-5 if device.type == "cpu" else 1e-4
    assert liger.losses == pytest.approx(plain.losses, rel=exact if bits == 8 else 1e-3)
    assert type(liger.trainer.optimizer.optimizer).__module__.startswith("torchao")


def test_compiled_layers_train_to_the_losses_of_eager_mode(folder: Path, device: torch.device) -> None:
    setup = setup_of(folder, device=device.type, liger="all")
    expected = trained(setup).losses
    rel = 1e-5 if device.type == "cpu" else 1e-4
    assert trained(replace(setup, compile="default")).losses == pytest.approx(expected, rel=rel)
    # Forward and backward of both layers.
    counters = torch._dynamo.utils.counters["inductor"]
    assert counters["fxgraph_cache_hit"] + counters["fxgraph_cache_miss"] == 2


def test_deepspeed_updates_on_the_host_by_its_own_adam(folder: Path, device: torch.device) -> None:
    pytest.importorskip("deepspeed")
    assert zero.adam_problem() == ""
    expected = trained(setup_of(folder, device=device.type)).losses
    offloaded = setup_of(folder, device=device.type, shard="zero3", offload="parameters")
    for liger in ("none", "all"):
        done = trained(replace(offloaded, liger=liger))
        assert done.losses == pytest.approx(expected, rel=1e-4)
        assert type(done.trainer.model_wrapped.basic_optimizer).__name__ == "DeepSpeedCPUAdam"


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_weights_on_a_disk_train_to_the_losses_of_those_in_memory(
    checkpoint: str, device: torch.device, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    if device.type == "cpu":
        pytest.skip("needs a GPU, to which weights are copied from the buffers that they are read into")
    if zero.disk_problem():
        pytest.skip(zero.disk_problem())
    # Smaller ones than 1 MiB stay in memory, and more go to the disk than there are buffers.
    wide = saved_model(tmp_path / "model", hidden_size=1024, intermediate_size=1024, num_key_value_heads=4)
    expected = trained(setup_of(wide, device=device.type, learning_rate=1e-4)).losses
    disk = {"shard": "zero3", "offload": "nvme", "nvme_folder": str(tmp_path)}
    offloaded = setup_of(wide, device=device.type, learning_rate=1e-4, **disk)
    for liger in ("none", "all"):
        done = trained(replace(offloaded, liger=liger, checkpoint=checkpoint))
        assert done.losses == pytest.approx(expected, rel=1e-4)
        weight = done.built.model.model.layers[0].mlp.up_proj.weight
        assert weight.ds_tensor.final_location.name == "nvme"
