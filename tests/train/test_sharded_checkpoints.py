# SPDX-License-Identifier: Apache-2.0
"""Every rank loads its own shards of a model alone, and writes them to checkpoints, which resume with other numbers of
ranks, and load anywhere."""

import errno
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import forks
from hf.two_ranks import on_two_ranks
from liger_bench.memory import peak_bytes
from liger_core.errors import OptionError
from liger_train.errors import SetupError
from liger_train.model import Built, build
from liger_train.row import Row
from liger_train.runs import checkpoint_writer
from liger_train.runs.run import run
from liger_train.setup import Setup
from liger_train.sharded_loading import SHARD, _init_whole, check_experts, copy_views
from train.training import At, needs_distributed, saved_model, setup_of

pytestmark = [pytest.mark.cpu, needs_distributed]
# Runs that continue one another, with four sequences per step.
RUNS: dict[str, dict[str, Any]] = {
    "two": {"shard": "fsdp2", "ranks": 2, "batch": 2, "steps": 2},
    "tp": {"tp": 2, "ranks": 2, "batch": 4, "steps": 5},
    "one": {"shard": "fsdp2", "ranks": 1, "batch": 4, "steps": 6},
}


class NoWeights(TorchDispatchMode):
    """Fails if ranks exchange tensors of floating-point numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            assert not any(isinstance(t, Tensor) and t.is_floating_point() for t in tree_leaves((args, kwargs))), func
        return func(*args, **(kwargs or {}))


def without_exchanged_weights(save: Callable[..., None]) -> Callable[..., None]:
    @wraps(save)
    def saving(*args: Any, **named: Any) -> None:
        with NoWeights():
            save(*args, **named)

    return saving


def written() -> None:
    """Wait until the checkpoint is written, or has failed."""
    for thread in threading.enumerate():
        if thread.name == checkpoint_writer.THREAD:
            thread.join()


def work(rank: int, setup: Setup, folder: str) -> None:
    """One rank of a run that resumes, and exports its model."""
    from torch.distributed import checkpoint

    from liger_train.runs import sharded_checkpoints

    # The thread that writes has modes of its own.
    functions = ((sharded_checkpoints, "save_model"), (sharded_checkpoints, "save_state"), (checkpoint, "save"))
    for module, name in functions:
        setattr(module, name, without_exchanged_weights(getattr(module, name)))
    row = run(setup, folder=Path(folder) / "saved", resume=True, export=Path(folder) / f"exported-{setup.steps}")
    assert not row.failed, row.reason
    if rank == 0:
        (Path(folder) / "row.json").write_text(json.dumps(row.columns()))


def work_on_a_full_disk(rank: int, setup: Setup, folder: str) -> None:
    """One rank of a run whose second rank cannot write its shards of the second checkpoint."""
    from torch.distributed.checkpoint import FileSystemWriter

    write = FileSystemWriter.write_data

    def full(self: Any, *args: Any) -> Any:
        if rank == 1 and "checkpoint-4" in str(self.path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args)

    FileSystemWriter.write_data = full  # type: ignore[method-assign]
    row = run(setup, folder=Path(folder), save_every=2, observers=[At(4, written)])
    assert (row.failed, row.reason) == (True, "OSError: [Errno 28] No space left on device")
    # The step that was running ended; the next one did not begin.
    assert (len(row.losses), row.interrupted) == (5, False)


@pytest.fixture(scope="module")
def whole(small: Setup) -> Row:
    """An uninterrupted run without sharding."""
    return run(replace(small, batch=4))


@pytest.fixture(scope="module")
def sharded(small: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs, with a copy of their checkpoint after each."""
    folder = tmp_path_factory.mktemp("sharded")
    for name, options in RUNS.items():
        forks.on_ranks(options["ranks"], work, replace(small, **options), str(folder))
        saved = f"checkpoint-{options['steps']}"
        shutil.copytree(folder / "saved" / saved, folder / name / saved)
    return folder


@pytest.mark.slow
def test_a_run_resumes_with_other_numbers_of_ranks(whole: Row, sharded: Path) -> None:
    row = json.loads((sharded / "row.json").read_text())
    assert row["losses"] == pytest.approx(whole.losses, rel=1e-5)
    assert row["notes"][-2] == f"Resumed from step 5, {sharded / 'saved' / 'checkpoint-5'}."


@pytest.mark.slow
def test_an_unsharded_run_with_as_many_sequences_resumes(
    small: Setup, whole: Row, sharded: Path, tmp_path: Path
) -> None:
    # Its last checkpoint replaces the one from which it resumes.
    folder = shutil.copytree(sharded / "two", tmp_path / "two")
    with pytest.raises(OptionError, match=r"needs the options of .*, which had --shard fsdp2, --ranks 2"):
        run(small, folder=folder, resume=True)
    row = run(replace(small, batch=4), folder=folder, resume=True)
    assert row.losses == pytest.approx(whole.losses, rel=1e-5), row.reason


@pytest.mark.slow
def test_transformers_loads_the_checkpoint_and_the_exported_model(small: Setup, sharded: Path) -> None:
    before, saved, exported = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (small.model, sharded / "one" / "checkpoint-6", sharded / "exported-6")
    )
    assert before.keys() == saved.keys()
    for name, weight in saved.items():
        assert torch.equal(weight, exported[name])
        assert not torch.equal(weight, before[name])
    # Every weight is written once.
    for folder in (sharded / "two" / "checkpoint-2", sharded / "exported-5", sharded / "exported-6"):
        files = [path.stat().st_size for path in folder.rglob("*.safetensors")]
        assert sum(files) == pytest.approx((Path(small.model) / "model.safetensors").stat().st_size, rel=0.1)


@pytest.mark.slow
def test_a_full_disk_of_one_rank_leaves_the_checkpoint_before(small: Setup, whole: Row, tmp_path: Path) -> None:
    forks.on_ranks(2, work_on_a_full_disk, replace(small, **RUNS["two"] | {"steps": 6}), str(tmp_path))
    row = run(replace(small, batch=4), folder=tmp_path, resume=True)
    assert row.losses == pytest.approx(whole.losses, rel=1e-5), row.reason
    assert row.notes[-2].startswith("checkpoint-4 was not completely written and was removed")


CPU = torch.device("cpu")
# Transformers stores the experts of a layer apart, and stacks them when it loads them.
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    # 127 rows on two ranks.
    "llama": {"vocab_size": 127},
    "qwen3_moe": EXPERTS | {"tie_word_embeddings": False},
}
# Large enough that a layer is a small part of it: 12 MB.
DEEP = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 12, "tie_word_embeddings": False}


def check_shards(built: Built, whole: nn.Module, rank: int) -> None:
    """Raises unless every weight of a model is on meta, with the shard of this rank."""
    expected = dict(whole.named_parameters())
    for name, weight in built.model.named_parameters():
        if "lora_" in name:
            assert not weight.is_meta
            continue
        plain = expected.pop(name.removeprefix("base_model.model.").replace(".base_layer", ""))
        rows: tuple[Tensor, ...] = plain.detach().chunk(2)
        assert weight.is_meta
        assert weight.shape == plain.shape
        assert torch.equal(getattr(weight, SHARD), rows[rank] if rank < len(rows) else plain[:0]), name
    assert not expected
    assert not any(buffer.is_meta for buffer in built.model.buffers())


def check_views(weight: DTensor) -> None:
    """Raises unless a shard that is a view is copied, and another one is not."""
    shard = weight.to_local().detach()
    wide = torch.cat((shard, shard))
    for local in (shard, wide[: len(shard)]):
        holder = nn.Module()
        like = DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)
        holder.weight = nn.Parameter(like)
        copy_views(holder)
        kept: Any = holder.weight.to_local()
        assert (kept.data_ptr() == local.data_ptr()) == (local is shard)
        assert kept.untyped_storage().nbytes() == kept.nbytes
        assert torch.equal(kept, shard)


class Copies(TorchDispatchMode):
    """Counts the elements that are copied from the accelerator to the CPU."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].device.type, result.device.type) == ("cuda", "cpu"):
            self.elements += result.numel()
        return result


def check_copies() -> None:
    """Raises unless this rank copies only its shard of a weight that is initialized on an accelerator."""
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(4, 6, bias=False, device="meta")
    shard = distribute_tensor(module.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    module.weight = nn.Parameter(shard)
    # No accelerator is needed for tensors without values.
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
        _init_whole(lambda module: module.weight.data.normal_(), torch.device("cuda"), module)
    assert copies.elements == 3 * 4


def load(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo")
    check_copies()
    for name in MODELS:
        setup = setup_of(Path(folder) / name, ranks=2, shard="fsdp2", liger="all")
        whole = AutoModelForCausalLM.from_pretrained(setup.model)
        check_shards(build(setup, CPU), whole, rank)
        adapted = build(replace(setup, adapter="lora"), CPU)
        check_shards(adapted, whole, rank)
        # As in every run, but for the ranks.
        random = replace(setup, random_weights=True)
        torch.manual_seed(random.seed)
        expected = type(whole).from_pretrained(None, config=AutoConfig.from_pretrained(setup.model), state_dict={})
        check_shards(build(random, CPU), expected, rank)
        if name == "llama":
            # An even number of rows; the plan of tensor parallelism shards columns, too.
            sharded = build(replace(random, model=str(Path(folder) / "deep"), shard="none", tp=2), CPU).model
            torch.manual_seed(random.seed)
            config = AutoConfig.from_pretrained(Path(folder) / "deep")
            weights = type(whole).from_pretrained(None, config=config, state_dict={}).state_dict()
            for key, weight in sharded.state_dict().items():
                assert torch.equal(weight.full_tensor() if isinstance(weight, DTensor) else weight, weights[key]), key
            check_views(next(weight for weight in sharded.parameters() if isinstance(weight, DTensor)))
    files = sum(path.stat().st_size for path in (Path(folder) / "deep").glob("*.safetensors"))
    # Files are mapped, so their pages belong to the page cache of the machine.
    random_weights = {"random_weights": True}
    for options, mapped in (({}, files), (random_weights, 0), ({"shard": "none", "tp": 2} | random_weights, 0)):
        deep = setup_of(Path(folder) / "deep", **{"ranks": 2, "shard": "fsdp2", "liger": "none"} | options)
        built: list[Any] = []
        held = peak_bytes(lambda deep=deep, built=built: built.append(build(deep, CPU)), CPU) - mapped
        whole_bytes, layer = (
            sum(weight.numel() * weight.itemsize for weight in part.parameters())
            for part in (built[0].model, built[0].model.model.layers[0])
        )
        assert held < whole_bytes / 2 + layer, (options, held, whole_bytes, layer)


def test_fewer_experts_than_ranks_are_refused_if_a_file_stores_them_separately(tmp_path: Path) -> None:
    saved_model(tmp_path, "qwen3_moe", **EXPERTS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    files = list(map(str, tmp_path.glob("*.safetensors")))
    setup = setup_of(tmp_path, shard="fsdp2")
    check_experts(model, replace(setup, ranks=3), files)
    check_experts(model, replace(setup, ranks=4, replicate=2), files)
    # The copies that the error names divide the ranks.
    for ranks, replicate, copies in ((4, 1, 2), (8, 1, 4), (8, 2, 4), (9, 1, 3), (10, 2, 5)):
        shared = f"got {ranks // replicate} ranks and 3 experts; use --replicate {copies}$"
        with pytest.raises(SetupError, match=shared):
            check_experts(model, replace(setup, ranks=ranks, replicate=replicate), files)
    # Random weights are made whole.
    check_experts(model, replace(setup, ranks=4), ())


@pytest.mark.slow
def test_each_rank_copies_and_holds_only_its_shards_and_one_layer_at_most(tmp_path: Path) -> None:
    for name, fields in MODELS.items():
        saved_model(tmp_path / name, name, **fields)
    saved_model(tmp_path / "deep", **DEEP)
    on_two_ranks(load, str(tmp_path))
