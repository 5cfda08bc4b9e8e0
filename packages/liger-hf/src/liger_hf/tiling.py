# SPDX-License-Identifier: Apache-2.0
"""Compute the gated MLPs of a long sequence in tiles of rows, so their activations take the memory of one tile.

Forward and backward pass are one autograd node, which saves only the input. Its backward pass recomputes tile by tile
and returns the gradient of each weight once, summed in float32. Hooks on the MLP itself, such as FSDP2's and
accelerate's, run once around it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_core.autograd import Kept, check_backward
from liger_core.private_names import replacing
from liger_hf.patch import Patch, replacement, slot
from liger_hf.private_transformers import OFFLOADED
from liger_hf.repeated import RandomState, Settings, draws
from liger_hf.rules.gated_mlp.rule import look
from liger_hf.verification import decide


class _Inside(threading.local):
    def __init__(self) -> None:
        self.tiles = False


INSIDE = _Inside()


def tileable(model: nn.Module, verify: bool) -> list[nn.Module]:
    """Return the modules that a check shows to be unmodified gated MLPs, which compute each row independently."""
    decisions: dict[Any, bool] = {}
    modules = []
    for module in model.modules():
        match = look(module)
        if match is None or match.refusal is not None or _gathers(module):
            continue
        if match.kind not in decisions:
            decisions[match.kind] = decide(match, verify).candidate is not None
        modules += [module] * decisions[match.kind]
    return modules


def _gathers(module: nn.Module) -> bool:
    """Return whether hooks gather or load the weights of the projections, which they would repeat for each tile.

    ZeRO-3, accelerate's offloading and tensor parallelism have such hooks.
    """
    return any(
        hasattr(p, "ds_id")
        or (p.is_meta and OFFLOADED in vars(child))
        or (isinstance(p, DTensor) and child._forward_hooks)
        for child in module.modules()
        for p in child.parameters(recurse=False)
    )


def tiles(module: nn.Module, rows: int) -> Patch:
    """Return a patch that makes the module's current forward compute at most `rows` rows at once."""
    current = module.__dict__.get(slot(module))
    inner = type(module).forward if current is None else current.__func__
    tiled = inner.__dict__.setdefault("__tiled__", {})
    if rows not in tiled:
        tiled[rows] = _tiled(inner, rows)
    return replacement(module, tiled[rows], inner)


def _tiled(inner: Callable[..., Tensor], rows: int) -> Callable[..., Tensor]:
    def forward(self: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*args, *named.values())
        if x.numel() <= rows * x.shape[-1] or torch.compiler.is_compiling() or isinstance(x, DTensor):
            return inner(self, x)
        run = _TiledCall(inner, self, rows, x)
        weights = run.weights()
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *weights)):
            return run.forward(x)
        # Saved before anything is computed: activation checkpointing recomputes a layer up to what is saved last.
        return _TiledNode.apply(Kept.apply(x, *weights), run, x, *weights)

    return forward


class _TiledCall:
    """A call of a module in tiles, which can be repeated with the same autocast, settings and random numbers."""

    def __init__(self, inner: Callable[..., Tensor], module: nn.Module, rows: int, x: Tensor) -> None:
        self.inner, self.module, self.rows, self.device = inner, module, rows, x.device
        kind = x.device.type
        self.autocast = (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.settings = Settings(module)
        self.numbers = RandomState(x.device) if draws(module) else None

    def weights(self) -> list[nn.Parameter]:
        """Return the weights that require gradients; in both passes, FSDP2 replaces them by gathered ones."""
        return [weight for weight in self.module.parameters() if weight.requires_grad]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor | None = None
        # Uncached, because the cached cast of a weight would have no gradient in the rest of the forward pass.
        with replacing(INSIDE, "tiles", True), torch.no_grad(), self._autocast(cache=False):
            for block, tile in self._tiles(x):
                output = self.inner(self.module, tile)
                y = output.new_empty(*x.shape[:-1], output.shape[-1]) if y is None else y
                _rows(y)[:, block] = output
        assert y is not None
        return y

    def backward(self, x: Tensor, grad: Tensor, needs: list[bool]) -> list[Tensor | None]:
        """Return the gradients of the input and of each weight."""
        weights = [weight for weight, need in zip(self.weights(), needs[1:], strict=True) if need]
        sums: list[Tensor | None] = [None] * len(weights)
        of_x = torch.empty_like(x) if needs[0] else None
        upstream = _rows(grad)
        rng = nullcontext() if self.numbers is None else self.numbers.again()
        with replacing(INSIDE, "tiles", True), _unhooked(weights), torch.enable_grad(), self._autocast(cache=True), rng:
            for block, tile in self._tiles(x):
                leaf = tile.detach().requires_grad_(needs[0])
                output = self.inner(self.module, leaf)
                wanted = [leaf, *weights] if needs[0] else weights
                gradients = list(torch.autograd.grad(output, wanted, upstream[:, block], allow_unused=True))
                # Free this tile before the next one is computed.
                del output, leaf, tile
                if of_x is not None:
                    _rows(of_x)[:, block] = gradients.pop(0)
                _add(sums, gradients)
                del gradients
        totals = zip(sums, weights, strict=True)
        answers = iter([None if total is None else total.to(weight.dtype) for total, weight in totals])
        return [of_x, *(next(answers) if need else None for need in needs[1:])]

    def _tiles(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        flat = _rows(x)
        for start in range(0, flat.shape[1], self.rows):
            block = slice(start, start + self.rows)
            yield block, flat[:, block]

    def _autocast(self, cache: bool) -> Any:
        dtype, enabled = self.autocast
        return torch.autocast(self.device.type, dtype, enabled, cache_enabled=cache)


class _TiledNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, saved: Tensor, run: _TiledCall, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.before, ctx.run = saved.grad_fn, run
        return run.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        check_backward("liger_hf.apply: a tiled MLP", *grads)
        # A weight that was updated since fails here.
        x, *_ = ctx.before.saved_tensors
        with ctx.run.settings.again():
            gradients = ctx.run.backward(x, grads[0], list(ctx.needs_input_grad[2:]))
        return grads[0].new_empty(0), None, *gradients


def _rows(x: Tensor) -> Tensor:
    """Reshape to one sequence of all rows, (1, rows, width), because modules may expect three dimensions."""
    return x.reshape(1, -1, x.shape[-1])


def _add(sums: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    for index, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
        if gradient is not None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            sums[index] = gradient.to(wide) if total is None else total.add_(gradient)


@contextmanager
def _unhooked(weights: Sequence[Tensor]) -> Iterator[None]:
    """Remove the hooks of weights within this context, because they expect the gradient of all tiles."""
    every = [(weight._backward_hooks, dict(weight._backward_hooks)) for weight in weights if weight._backward_hooks]
    for hooks, _ in every:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in every:
            hooks.update(before)
