# SPDX-License-Identifier: Apache-2.0
"""`--compile`: torch.compile for each layer of a model.

Layers of the same kind share a graph, so compile time does not grow with their number.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from liger_core.private_names import replacing
from liger_core.private_torch import CompilerError, OperatorIssue, compiler_counters, compiler_times
from liger_hf.private_transformers import CHECKPOINT
from liger_train.checkpointing import WITHIN, layers, set_checkpoint
from liger_train.errors import SetupError, release_frames

COMPILER = "inductor"
# The limit of graphs: one for each kind of layer and shape, in training and in evaluation. After 8, torch's default,
# layers run in eager mode.
GRAPHS = 64
# The attribute of a layer with its forward from before it was compiled.
EAGER = "_eager_forward"
CACHE = "TORCHINDUCTOR_CACHE_DIR"

R = TypeVar("R")


def compile_layers(
    model: nn.Module, within: bool, backend: Callable[..., Any] | None = None, *, fullgraph: bool = False
) -> str:
    """Compile the forward of every layer at its first call; return a sentence for the user.

    `within` makes activation checkpointing a part of the graph, so that no result is recomputed that the backward pass
    does not need, such as the layer's last matmul. `fullgraph` makes a layer that is not one graph an error. Hooks are
    not compiled, so FSDP2 wraps a layer as in eager mode.

    Raises OptionError for a model without such layers.
    """
    model_layers = layers(model)
    if not model_layers:
        raise SetupError(f"--compile needs layers that Transformers can checkpoint, got {type(model).__name__}")
    for layer in model_layers:
        vars(layer)[EAGER] = layer.forward
        if within:
            vars(layer)[WITHIN] = None
            if layer.gradient_checkpointing:
                set_checkpoint(layer, getattr(layer, CHECKPOINT))
        forward = MethodType(_with_checkpoint, layer) if within else layer.forward
        layer.forward = torch.compile(forward, backend=backend or COMPILER, dynamic=False, fullgraph=fullgraph)
    return f"Compiling {len(model_layers)} layers, each kind of them once."


def undo(model: nn.Module) -> None:
    """Restore the layers as they were before `compile_layers`."""
    for layer in layers(model):
        if EAGER in vars(layer):
            layer.forward = vars(layer).pop(EAGER)
        function = vars(layer).pop(WITHIN, None)
        if function is not None:
            set_checkpoint(layer, function)


def _with_checkpoint(layer: Any, *args: Any, **options: Any) -> Any:
    forward, checkpoint = getattr(layer, EAGER), getattr(layer, WITHIN)
    if checkpoint is None or not (layer.gradient_checkpointing and layer.training):
        return forward(*args, **options)
    return checkpoint(partial(forward, **options), *args)


@contextmanager
def session(packing: bool = False) -> Iterator[None]:
    """Set up PyTorch for compiling within this context.

    The limit of graphs is raised, and the cache is persistent. Messages of Inductor name an op without its arguments:
    up to torch 2.12, it describes what each custom op is computed from, which grows exponentially with their number,
    whether or not anybody reads it.
    """
    from accelerate.utils import patch_environment
    from torch._dynamo import config

    from liger_hf.private_transformers import as_outside_a_capture

    with ExitStack() as stack:
        stack.enter_context(config.patch(recompile_limit=max(GRAPHS, config.recompile_limit)))
        stack.enter_context(patch_environment(**{CACHE: cache()}))
        stack.enter_context(replacing(OperatorIssue(), "operator_str", staticmethod(lambda op, *_: f"  {op}")))
        stack.callback(torch.compiler.reset)
        if not packing:
            # During the capture of a graph, Transformers cannot read the values of positions, and would add masks, with
            # which attention is slower.
            stack.enter_context(as_outside_a_capture())
        yield


def cache() -> str:
    """Return the folder of compiled graphs: the one in the environment, or one in the user's cache.

    PyTorch's default, which it also writes into the environment, is ignored: a restart of the machine empties it.
    """
    chosen = os.environ.get(CACHE)
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "liger" / "compiled"
    if chosen and not chosen.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        return chosen
    with suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
    return str(path) if os.access(path, os.W_OK) else chosen or os.path.join(tempfile.gettempdir(), "liger-compiled")


def seconds() -> float:
    """Return the seconds that this process has spent compiling."""
    return float(compiler_times()().get("total_wall_time", 0.0))


def cache_hits_and_misses() -> tuple[int, int]:
    """Return how many graphs came from the cache, and how many were compiled; forward and backward count separately."""
    counted = compiler_counters()["inductor"]
    return counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"]


def or_eagerly(step: Callable[[], R], model: nn.Module, failed: Callable[[str], object]) -> R:
    """Run a step; if the compiler fails and no earlier step left gradients, `failed` gets the reason, and the layers
    run in eager mode."""
    has_gradients = any(weight.grad is not None for weight in model.parameters())
    try:
        return step()
    except CompilerError() as error:
        if has_gradients:
            raise
        reason = first_line(getattr(error, "inner_exception", error))
        release_frames(error)
    undo(model)
    model.zero_grad(set_to_none=True)
    failed(reason)
    return step()


def first_line(error: BaseException) -> str:
    """Return the first line of an error, for use in a sentence."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
