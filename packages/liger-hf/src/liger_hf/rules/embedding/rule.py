# SPDX-License-Identifier: Apache-2.0
"""Embeddings: nn.Embedding, and subclasses that scale its rows by an attribute.

The op differs from PyTorch's only in the gradient of the table, so calls without a gradient, and tables that are
DTensors, run as before.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import embedding
from liger_hf.patch import forward_of, replacement
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, configuration, device_of, of_length, replica, sized, trial

NOTHING = "no module is an nn.Embedding"
# Sizes of the stand-in: indices repeat, and one row is for padding.
ROWS, WIDTH, PADDING = 13, 24, 2


def look(module: nn.Module) -> Found | None:
    if not isinstance(module, nn.Embedding):
        return None
    original = forward_of(module)
    if isinstance(original, str):
        return Found("embedding", refusal=original)
    arguments = tuple(inspect.signature(original).parameters)[1:]
    if (reason := _refusal(module, arguments)) is not None:
        return Found("embedding", refusal=reason)
    weight = module.weight
    return Found(
        "embedding",
        kind=(configuration(module), tuple(module._buffers), weight.dtype, str(weight.device)),
        original=original,
        candidates=lambda: (_candidate(scale, original, arguments[0]) for scale in (None, *_scales(module))),
        cases=lambda device, dtypes: _cases(module, device, dtypes),
        device=lambda: device_of(module),
        dtype=weight.dtype,
    )


def _refusal(module: nn.Embedding, arguments: tuple[str, ...]) -> str | None:
    """Return why the op cannot compute this embedding's gradient; None if it can."""
    if len(arguments) != 1:
        return f"an embedding must take indices alone, its forward takes ({', '.join(arguments)})"
    if not module.weight.is_floating_point():
        return f"its table must have a floating dtype, it has {module.weight.dtype}"
    if not module.weight.requires_grad:
        return "its table is frozen, and the op differs in the gradient alone"
    if module._modules:
        return f"it must have no children, it has {', '.join(module._modules)}"
    options = ("sparse", "max_norm", "scale_grad_by_freq")
    unsupported = [name for name in options if getattr(module, name) not in (None, False)]
    return f"the op has no {' and no '.join(unsupported)}" if unsupported else None


def _scales(module: nn.Module) -> Iterator[str]:
    """Yield the attributes that may hold the scale of the rows: numbers, and buffers with one element."""
    yield from (
        name for name, value in module._buffers.items() if "scale" in name and value is not None and value.numel() == 1
    )
    for name, value in vars(module).items():
        if "scale" in name and type(value) in (int, float) and math.isfinite(value):
            yield name


def _candidate(scale: str | None, original: Callable[..., Any], argument: str) -> Candidate:
    def forward(self: nn.Module, *inputs: Tensor, **named: Tensor) -> Any:
        (index,) = inputs or (named[argument],)
        weight: Any = self.weight
        # PyTorch looks rows of a DTensor up without gathering the table.
        if not (torch.is_grad_enabled() and weight.requires_grad and type(weight) in (Tensor, nn.Parameter)):
            return original(self, index)
        y = embedding(index, weight, padding_idx=self.padding_idx)  # type: ignore[arg-type]
        if scale is None:
            return y
        factor: Any = getattr(self, scale)
        return y * (factor.to(weight.dtype) if isinstance(factor, Tensor) else factor)

    return Candidate(
        embedding, f"times {scale}" if scale else "", forward, lambda module: [replacement(module, forward, original)]
    )


def _cases(module: nn.Module, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    draw = Draw(device)
    table, upstream, index = draw.normal(ROWS, WIDTH), draw.normal(3, 40, WIDTH), draw.integers(ROWS, 3, 40)
    for name, dtype, scale in sized(dtypes):
        yield Case(name, dtype, _run(module, index, (table * scale).to(dtype), upstream.to(dtype)))
    for length in LENGTHS:
        run = _run(module, draw.integers(ROWS, 1, length), table, draw.normal(1, length, WIDTH))
        yield of_length(length, torch.float32, run)


def _run(module: nn.Module, index: Tensor, table: Tensor, upstream: Tensor) -> Run:
    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        twin = replica(module, parameters=weights)
        twin.num_embeddings, twin.embedding_dim = ROWS, WIDTH
        twin.padding_idx = None if module.padding_idx is None else PADDING
        return {"output": function(twin, index)}

    return trial(call, {}, {"output": upstream}, {"weight": table})


RULE = Rule("embedding", look, ("embedding",), NOTHING, on_request=True)
