# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models, by torch.distributed.checkpoint: each rank writes and reads its own shards.

The weights are files of Hugging Face, which any number of ranks reads, sharded or not. A folder has the rest: the
optimizer, and the weights of adapters.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from liger_train import ranks
from liger_train.float8 import is_cast_when_gathered
from liger_train.runs.saved_checkpoints import SHARDS
from liger_train.sharded_loading import sharded_like

# Bytes of a file of weights.
FILE_SIZE = 5 * 10**9
State = dict[str, Any]
# Writes a state with a function of the state and of a process group, which all ranks call.
Write = Callable[[State, Callable[[State, Any], None]], None]


def at_once(state: State, function: Callable[[State, Any], None]) -> None:
    """Write a state before returning, in the default process group."""
    function(state, None)


@contextlib.contextmanager
def _first_failure() -> Iterator[None]:
    """Raise the error of the first rank that failed: a run does not catch a CheckpointException."""
    try:
        yield
    except CheckpointException as error:
        problem, _ = error.failures[min(error.failures)]
        raise problem from error


def save_model(model: Any, folder: Path, write: Write = at_once) -> None:
    """Write the weights and the config of a model, or its adapters; all ranks must call this."""
    if hasattr(model, "peft_config"):
        trained = _trained(model).items()
        adapters = {name: weight.full_tensor() if isinstance(weight, DTensor) else weight for name, weight in trained}
        if ranks.first():
            model.save_pretrained(folder, state_dict=adapters)
        return
    if ranks.first():
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        for config in filter(None, (model.config, model.generation_config)):
            config.save_pretrained(folder)
    write(_weights(model), partial(_write_weights, folder))


@_first_failure()
def load_model(model: Any, folder: Path) -> None:
    """Read the weights of a model in place: each rank reads its shards."""
    if hasattr(model, "peft_config"):
        checkpoint.load({"model": _trained(model)}, checkpoint_id=folder / SHARDS)
    else:
        checkpoint.load(_weights(model), storage_reader=HuggingFaceStorageReader(str(folder)))


def save_state(model: Any, optimizer: Any, scheduler: Any, folder: Path, write: Write = at_once) -> None:
    """Write the optimizer, the scheduler, and the weights of adapters; all ranks must call this."""
    write(_state(model, optimizer, scheduler), partial(_write_state, folder))


@_first_failure()
def load_state(model: Any, optimizer: Any, scheduler: Any, folder: Path) -> None:
    """Restore the optimizer and the scheduler."""
    state = _state(model, optimizer, scheduler)
    checkpoint.load(state, checkpoint_id=folder / SHARDS)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


@_first_failure()
def _write_weights(folder: Path, weights: State, group: Any) -> None:
    files: dict[str, int] = {}
    size = 0
    for name, weight in weights.items():
        size += weight.numel() * weight.itemsize
        files[name] = 1 + size // FILE_SIZE
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True, enable_consolidation=True)
    checkpoint.save(weights, storage_writer=writer, process_group=group)
    if ranks.first():
        shutil.rmtree(folder / "sharded")


@_first_failure()
def _write_state(folder: Path, state: State, group: Any) -> None:
    checkpoint.save(state, checkpoint_id=folder / SHARDS, process_group=group)


def _state(model: Any, optimizer: Any, scheduler: Any) -> State:
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "scheduler": scheduler.state_dict()}
    return state | ({"model": _trained(model)} if hasattr(model, "peft_config") else {})


def _weights(model: nn.Module) -> State:
    """Return the state of a model, with one name for tied weights."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = names - {name for name, _ in model.named_parameters()}
    return {name: _plain(weight) for name, weight in get_model_state_dict(model).items() if name not in tied}


def _plain(weight: Any) -> Any:
    """Return a weight that FSDP2 gathers in float8 as an ordinary one with the same memory."""
    if not is_cast_when_gathered(weight):
        return weight
    shard = weight.to_local()
    # torchao's class wraps a tensor; a scale may come after it.
    return sharded_like(weight, getattr(shard, shard.__tensor_flatten__()[0][0]))


def _trained(model: nn.Module) -> State:
    return dict(get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True)))
