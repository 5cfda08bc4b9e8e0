# SPDX-License-Identifier: Apache-2.0
"""The children of a gated MLP, and the order in which its forward calls them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_hf.stand_in import MODE, Draw, Unfit, replica

# (gate and up in the order of definition, or the packed projection), and down.
Layout = tuple[tuple[str, ...], str]
# The children that a forward calls, in calling order, each with its input.
Calls = list[tuple[str, Tensor]]
# Sizes of the stand-in, which do not matter to an elementwise op.
HIDDEN, INNER = 24, 40
ROWS = (2, 9)
# The seed of inputs. With the seed of the weights, rows would equal weights, whose products overflow float16.
INPUTS = 1


@dataclass
class MLPParts:
    """The children of a gated MLP: projections, dropouts and norms of rows between them, and ignored children.

    order  the order in which the forward calls them; empty until `watch` has run it
    """

    linears: dict[str, nn.Module]
    between: dict[str, nn.Module]
    passed: dict[str, nn.Module]
    layout: Layout
    order: tuple[str, ...] = ()

    def stand_ins(self, device: torch.device) -> dict[str, nn.Module]:
        """Return random projections, and the other children without hooks, which must not see random inputs."""
        draw = Draw(device)
        inputs, down = self.layout
        sizes = {name: (HIDDEN, INNER * (3 - len(inputs))) for name in inputs} | {down: (INNER, HIDDEN)}
        layers = {
            name: draw.linear(*sizes[name], bias=getattr(child, "bias", None) is not None)
            for name, child in self.linears.items()
        }
        markers = {name: Marker(0.0 if isinstance(child, nn.Dropout) else 0.5) for name, child in self.between.items()}
        return {**layers, **markers, **{name: replica(child) for name, child in self.passed.items()}}

    def around(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the children that are called before gate and up, and of those called after them."""
        called = [name for name in self.order if name not in self.passed]
        indices = [index for index, name in enumerate(called) if name in self.layout[0]]
        return (tuple(called[: indices[0]]), tuple(called[indices[-1] + 1 :])) if indices else ((), ())


class Marker(nn.Module):
    """A stand-in for a dropout or a norm; a module that calls it elsewhere, or not at all, has another result.

    kink  0 for a child that multiplies rows, such as a dropout, because it commutes with a factor; nonzero for a norm
    """

    def __init__(self, kink: float) -> None:
        super().__init__()
        self.kink = kink

    def forward(self, x: Tensor) -> Tensor:
        if not (self.kink or MODE.training):
            # A dropout in evaluation.
            return x
        return x * 1.25 + 0.1 * (x - self.kink).abs()


def watch(module: nn.Module, original: Callable[..., Any], parts: MLPParts, stand_ins: dict[str, nn.Module]) -> None:
    """Record the order of calls; raise Unfit if the forward does more between projections than call the children."""
    trained = _calls(module, original, stand_ins, True)
    parts.order = tuple(name for name, _ in trained)
    for name, x in trained:
        if name in parts.between and x.shape[:-1] != ROWS:
            raise Unfit(f"{name} must get one row per row of its input {(*ROWS, HIDDEN)}, it gets {tuple(x.shape)}")
    evaluated = _calls(module, original, stand_ins, False)
    for name, child in parts.between.items():
        uses = [[called for called, _ in calls].count(name) for calls in (trained, evaluated)]
        # A dropout does nothing in evaluation, whether it is called or not.
        if uses[0] != uses[1] and not isinstance(child, nn.Dropout):
            raise Unfit(f"its forward calls {name} {uses[0]} times in training, {uses[1]} times in evaluation")
        if not any(uses):
            raise Unfit(f"its forward does not call {name}, which may be for other calls")
    if _columns(module, original, parts, stand_ins, evaluated) > 1:
        raise Unfit(
            "what happens between its projections is not elementwise: one gate changes what becomes of the others in "
            "its row"
        )


def _columns(
    module: nn.Module, original: Callable[..., Any], parts: MLPParts, stand_ins: dict[str, nn.Module], plain: Calls
) -> int:
    """Return how many columns of down's input change with the weights of one gate.

    The module is in evaluation mode, where nothing else is random.
    """
    weight: Any = stand_ins[parts.layout[0][0]].weight
    with torch.no_grad():
        row = weight[0].clone()
        weight[0] *= -3.0
        changed = _calls(module, original, stand_ins, False)
        weight[0] = row
    before, after = ([x for name, x in calls if name == parts.layout[1]] for calls in (plain, changed))
    if len(before) != 1 or len(after) != 1 or before[0].shape != after[0].shape:
        return 0
    return int((~torch.isclose(before[0], after[0])).flatten(0, -2).any(0).sum())


def _calls(module: nn.Module, original: Callable[..., Any], stand_ins: dict[str, nn.Module], training: bool) -> Calls:
    calls: Calls = []
    handles = [
        child.register_forward_pre_hook(lambda child, inputs, name=name: calls.append((name, inputs[0])))
        for name, child in stand_ins.items()
    ]
    twin = replica(module, children=stand_ins)
    twin.training = training
    device = next(p.device for child in stand_ins.values() for p in child.parameters())
    try:
        with torch.no_grad():
            original(twin, Draw(device, INPUTS).normal(*ROWS, HIDDEN, scale=2.0))
    finally:
        for handle in handles:
            handle.remove()
    return calls
