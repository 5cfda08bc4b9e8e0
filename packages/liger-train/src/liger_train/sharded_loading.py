# SPDX-License-Identifier: Apache-2.0
"""Load each rank's shards of a model, so that no rank ever holds the whole model.

Transformers loads into a model without weights. For tensor parallelism, it makes them DTensors, so each rank reads its
own shards from the files. For FSDP2, they become DTensors here. The model then waits on the meta device, where Liger
replaces its modules and FSDP2 shards it. Each weight there has its shard as an attribute, which FSDP2's DTensor gets in
the end.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from transformers import PreTrainedModel

from liger_hf.private_transformers import INITIALIZE, INITIALIZED, before_loading
from liger_train.errors import SetupError
from liger_train.float8 import scale_after_steps
from liger_train.setup import Setup

# The attribute of a weight on the meta device with this rank's shard.
SHARD = "liger_shard"


def in_shards(setup: Setup, device: torch.device) -> AbstractContextManager[None]:
    """Make Transformers load shards alone in this context: of a checkpoint, or of random weights.

    Random weights are initialized on the device, one module after the other, each of them whole on every rank. So they
    do not depend on the number of ranks.
    """
    if setup.tp > 1:
        return before_loading(lambda model, files: _initialize_on(device, model))
    # Only the number of this rank matters, and files are mapped to host memory. By the name fsdp, PEFT knows that a
    # module computes its whole output, and makes adapters of that size.
    names = ("replicas", "fsdp")
    mesh = init_device_mesh("cpu", (setup.replicate, setup.ranks // setup.replicate), mesh_dim_names=names)["fsdp"]

    def prepare(model: Any, files: Any) -> None:
        check_experts(model, setup, files or ())
        _shard(model, mesh, device)

    return before_loading(prepare)


def check_experts(model: nn.Module, setup: Setup, files: Iterable[str]) -> None:
    """Raise SetupError if the files store each expert separately and there are fewer experts than ranks of a copy.

    Transformers stacks the experts of a rank, and would fail on a rank that has none, while the others wait for it.
    """
    total, ranks = setup.ranks, setup.sharing_ranks
    few = {
        (path.rpartition(".")[2], weight.shape[0])
        for path, module in model.named_modules()
        for weight in module.parameters(recurse=False)
        if weight.dim() == 3 and weight.shape[0] < ranks
    }
    if few:
        names = [name for file in files if file.endswith(".safetensors") for name in _names(file)]
        for module, count in sorted(few):
            if any(f".{module}.0." in name for name in names):
                copies = next(n for n in range(1, total + 1) if total % n == 0 and total // n <= count)
                raise SetupError(
                    "--shard fsdp2 must have at most as many ranks for each copy as experts, which this checkpoint "
                    f"stores separately, got {ranks} ranks and {count} experts; use --replicate {copies}"
                )


def _names(file: str) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def _shard(model: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard the weights of a model on the meta device as FSDP2 does: along their first dimension."""
    _initialize_on(device, model)
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.dim() and not isinstance(weight, DTensor):
                module._parameters[name] = _sharded(weight, mesh, [Shard(0)])


def _initialize_on(device: torch.device, model: Any) -> None:
    """Make Transformers initialize each module of a model whole on the device, and keep this rank's shards."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and (initialize := getattr(module, INITIALIZE, None)) is not None:
            # Transformers calls it for each module with weights that no file has.
            vars(module)[INITIALIZE] = partial(_init_whole, initialize, device)


def _sharded(weight: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """Return this rank's shard of a weight, on the device of the mesh."""
    whole = weight.detach()
    if tuple(placements) == (Shard(0),):
        # distribute_tensor would first copy the whole weight to the device of the mesh.
        chunks, rank = whole.chunk(mesh.size()), mesh.get_local_rank()
        rows = _owned(chunks[rank] if rank < len(chunks) else whole[:0])
        shard = DTensor.from_local(rows, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    else:
        shard = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return nn.Parameter(shard, weight.requires_grad)


def _init_whole(initialize: Any, device: torch.device, module: nn.Module) -> None:
    """Initialize the weights of one module that no file has, and keep this rank's shards of them."""
    weights: dict[str, Any] = module._parameters
    layouts = {
        name: (weight.device_mesh, weight.placements)
        for name, weight in weights.items()
        if isinstance(weight, DTensor) and not getattr(weight, INITIALIZED, False)
    }
    for name in layouts:
        weights[name] = nn.Parameter(torch.empty(weights[name].shape, dtype=weights[name].dtype, device=device))
    initialize(module)
    for name, layout in layouts.items():
        weights[name] = _sharded(weights[name], *layout)


def forget_initialization(model: nn.Module) -> None:
    """Undo what in_shards did to the modules of a model."""
    for module in model.modules():
        vars(module).pop(INITIALIZE, None)


@torch.no_grad()
def copy_views(model: nn.Module) -> None:
    """Copy the shards of a model that are views.

    Others stay: the C library may not return the memory of what is freed, so that a rank would hold its shards twice.
    """
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            shard = weight.to_local()
            owned = _owned(shard)
            if owned is not shard:
                _give(weight, owned)


def _owned(shard: Tensor) -> Tensor:
    """Return the shard, or its copy if it is a view, which would keep the whole weight in memory."""
    return shard.clone() if shard.untyped_storage().nbytes() > shard.nbytes else shard


@torch.no_grad()
def wait_on_meta(
    model: nn.Module, device: torch.device, converted: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    """Replace the weights of a model by weights on the meta device, which have this rank's shards on the device.

    converted  (module, weight, shard) → both, as the classes of tensors that FSDP2 shards
    """
    forget_initialization(model)
    waiting: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, DTensor):
                if id(weight) not in waiting:
                    whole: Any = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                    whole, shard = converted(module, whole, _owned(weight.to_local().to(device)))
                    whole = nn.Parameter(whole, weight.requires_grad)
                    setattr(whole, SHARD, shard)
                    # accelerate finds the weights of an optimizer by their addresses, and on meta they have none.
                    whole.data_ptr = partial(id, whole)
                    waiting[id(weight)] = whole
                module._parameters[name] = waiting[id(weight)]


def give_shards(accelerator: Any) -> None:
    """Make this accelerator give a model its shards as soon as FSDP2 has sharded it, with its optimizer."""
    prepare = accelerator.prepare

    def prepared(*objects: Any, **options: Any) -> Any:
        models = [each for each in objects if isinstance(each, nn.Module)]
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        places = [
            (module, name, getattr(weight, SHARD))
            for model in models
            for module in model.modules()
            for name, weight in module._parameters.items()
            if hasattr(weight, SHARD)
        ]
        result = prepare(*objects, **options)
        for module, name, shard in places:
            weight: Any = getattr(module, name)
            if weight.is_meta:
                _give(weight, shard)
        for model, optimizer in product(models, optimizers):
            scale_after_steps(model, optimizer)
        return result

    accelerator.prepare = prepared


def _give(weight: Any, shard: Tensor) -> None:
    """Give a weight another shard, in place, so that FSDP2, the optimizer, hooks and tied modules keep the weight."""
    whole = sharded_like(weight, shard.to(weight.dtype))
    torch.utils.swap_tensors(weight, nn.Parameter(whole, weight.requires_grad))


def sharded_like(weight: Any, shard: Tensor) -> DTensor:
    """Return a DTensor of a rank's shard, with the shape and the placements of a weight."""
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
