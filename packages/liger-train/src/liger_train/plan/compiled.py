# SPDX-License-Identifier: Apache-2.0
"""Compiled layers of a plan: the graphs of torch.compile, which run on fake tensors instead of becoming code.

PyTorch decides what a layer saves for its backward pass. Within a graph, only results of fused ops take memory.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from liger_core.private_names import replacing
from liger_core.private_torch import (
    active_modes,
    compile_by_inductor,
    fusible_operators,
    graph_options,
    without_modes,
)
from liger_train import compiling
from liger_train.checkpointing import layers
from liger_train.plan.ledger import Ledger

# The modes outside of the running layer, the innermost last.
_outside: list[Any] = []


@contextmanager
def session(packing: bool) -> Iterator[None]:
    """Set up PyTorch for the graphs of a plan within this context."""
    with compiling.session(packing), graph_options()(enable_autograd_cache=False):
        yield


def compile_layers(model: nn.Module, within: bool) -> str:
    """Trace the forward of every layer at its first call; return a sentence for the user."""
    note = compiling.compile_layers(model, within, backend=_graphs, fullgraph=True)
    for layer in layers(model):
        layer.forward = _outside_of_modes(layer.forward)
    return note


def _outside_of_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another one without dispatch modes, in which Dynamo does not compile."""

    @wraps(function)
    def outside(*args: Any, **options: Any) -> Any:
        _outside[:] = active_modes()
        try:
            with without_modes():
                return function(*args, **options)
        finally:
            _outside.clear()

    return outside


def _graphs(module: GraphModule, inputs: Any) -> Any:
    """Compile like Inductor, up to the graphs of the forward and backward pass."""
    return compile_by_inductor()(module, inputs, inner_compile=_runner)


def _runner(module: GraphModule, inputs: Any, **options: Any) -> Callable[[list[Any]], Any]:
    """Return a function that runs a graph, and takes its arguments as a list, to release each after its last use."""

    def run(arguments: list[Any]) -> Any:
        with ExitStack() as stack:
            # Autograd runs the backward pass within the modes.
            for mode in _outside:
                stack.enter_context(mode)
            ledger = next(mode for mode in active_modes() if isinstance(mode, Ledger))
            return _Graph(module, ledger).boxed_run(arguments)

    vars(run)["_boxed_call"] = True
    return run


class _Graph(Interpreter):
    """Runs a graph; the ledger records only results that some user is not fused with."""

    def __init__(self, module: GraphModule, ledger: Ledger) -> None:
        super().__init__(module)
        self.ledger = ledger
        fusible = fusible_operators()().fusible_ops
        self.fused = {node for node in module.graph.nodes if {*map(_operator, (node, *node.users))} <= fusible}

    def boxed_run(self, arguments: list[Any]) -> Any:
        # Inductor allocates each output of a kernel.
        with replacing(self.ledger, "replace", partial(vars(self.ledger)["replace"], overwrites=False)):
            return super().boxed_run(arguments)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The state of the generator, with which a checkpoint draws the same numbers again, takes no memory.
        if str(target) == "run_and_save_rng_state":
            return torch.empty(0, dtype=torch.uint8), super().call_function(args[0], args[1:], kwargs)
        if str(target) == "run_with_rng_state":
            return super().call_function(args[1], args[2:], kwargs)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        if n not in self.fused:
            return super().run_node(n)
        with replacing(self.ledger, "paused", True):
            result = super().run_node(n)
        if isinstance(result, Tensor) and n.target is not getitem:
            # The users of the result read these instead.
            vars(result)["inputs"] = self.fetch_args_kwargs_from_env(n)
        return result


def _operator(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)
