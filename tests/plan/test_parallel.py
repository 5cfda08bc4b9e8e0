# SPDX-License-Identifier: Apache-2.0
"""Plans of data, tensor and context parallelism: the shards that Transformers makes, and the memory that two ranks
take on the CPU."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import forks
from hf.tensor_ranks import distributed
from hf.tiny_models import make
from liger_core.errors import OptionError
from liger_hf.presets import preset
from liger_train.plan import parallel
from liger_train.plan.ledger import LOGITS
from liger_train.plan.step import predict
from liger_train.setup import Setup
from plan.measuring import measured_bytes, tiny

# FSDP2 last: accelerate remembers it in the environment.
SETUPS: dict[str, dict[str, Any]] = {
    "dp, plain": {"liger": "none", "checkpoint": "full"},
    "dp, with Liger and micro-batches": {"accumulation": 3},
    "dp, with Liger and adapters": {"adapter": "lora", "checkpoint": "full"},
    "tp, plain": {"tp": 2, "liger": "none"},
    "tp, plain, mixed precision": {"tp": 2, "liger": "none", "precision": "bf16"},
    "tp, with Liger": {"tp": 2, "checkpoint": "full", "batch": 8},
    "cp, plain": {"cp": 2, "shard": "fsdp2", "liger": "none"},
    "cp, with Liger, mixed precision": {"cp": 2, "shard": "fsdp2", "precision": "bf16"},
    "dp, with Liger and frozen shards": {"shard": "fsdp2", "adapter": "lora", "precision": "bf16"},
    "dp, plain, with a head of its own": {"shard": "fsdp2", "liger": "none", "checkpoint": "full", "batch": 1},
}
# Tied weights are tied again when a model is loaded.
MODELS = ("llama", "qwen3", "gemma2", "phi")


def work(rank: int, folder: str, models: list[str], setups: list[str]) -> None:
    """One of two processes: the shapes of the shards of models, and the peaks of setups."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    shapes = {}
    for name in models:
        model = distributed(make(name, tie_word_embeddings=False), mesh)
        shapes[name] = {n: list(getattr(p, "_local_tensor", p).shape) for n, p in model.named_parameters()}
    functional.wait_tensor = _patient(functional.wait_tensor)
    # The least of three runs is that of a thread in time.
    peaks = {
        name: min(measured_bytes(of_two_ranks(name, folder)) for _ in range(3 if "plain" in name else 1))
        for name in setups
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"shapes": shapes, "peaks": peaks}))
    dist.barrier()


def of_two_ranks(name: str, folder: str) -> Setup:
    """Return one of SETUPS; a model with a head of its own is in `folder`."""
    setup = tiny(ranks=2, **SETUPS[name])
    if not name.endswith("a head of its own"):
        return setup
    path = Path(folder, str(dist.get_rank() if dist.is_initialized() else "plan"))
    config = preset("tiny", setup.sequence)
    config.tie_word_embeddings = False
    config.save_pretrained(path)
    return replace(setup, model=str(path), random_weights=True)


def _patient(wait: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """wait, and time for the thread of gloo to run once more: until then it holds the logits that it has gathered."""

    def waiting(tensor: Tensor) -> Tensor:
        found = wait(tensor)
        time.sleep(0.01)
        return found

    return waiting


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, names = tmp_path_factory.mktemp("ranks"), forks.cases(request, "name")
    forks.on_ranks(2, work, str(folder), *([name for name in kind if name in names] for kind in (MODELS, SETUPS)))
    return json.loads((folder / "0.json").read_text())


pytestmark = [pytest.mark.slow, pytest.mark.cpu]


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_has_the_shards_that_transformers_gives_it(name: str, found: dict[str, dict[str, Any]]) -> None:
    model = make(name, tie_word_embeddings=False)
    parallel.shard(model, Setup(name, tp=2, ranks=2))
    assert {n: list(p.shape) for n, p in model.named_parameters()} == found["shapes"][name]


@pytest.mark.parametrize("name", SETUPS)
def test_the_prediction_for_a_rank_is_its_peak(name: str, found: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    assert predict(of_two_ranks(name, str(tmp_path))).peak_bytes == pytest.approx(found["peaks"][name], rel=0.02)


def test_only_the_fused_loss_leaves_the_logits_of_other_ranks_to_them() -> None:
    one, plain, fused = (
        predict(tiny(tp=tp, ranks=tp, liger=liger)) for tp, liger in ((1, "none"), (2, "none"), (2, "all"))
    )
    assert plain.held[LOGITS] == one.held[LOGITS]
    assert fused.held[LOGITS] < one.held[LOGITS] / 2
    assert plain.parameters == fused.parameters == one.parameters


def test_tensor_parallelism_without_a_plan_of_linear_layers_cannot_be_planned() -> None:
    with pytest.raises(OptionError, match="plan: --tp needs a model whose tp_plan shards linear layers alone"):
        parallel.shard(make("mixtral"), Setup("mixtral", tp=2, ranks=2))
