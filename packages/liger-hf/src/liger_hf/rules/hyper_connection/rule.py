# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections (mHC): a module that projects normalized streams to coefficients and a doubly stochastic matrix.

The Sinkhorn iterations, 40 launches that each save a result for the backward pass, become one launch; norm and
projection read the streams once, without a float32 copy. The decoder layer's use of the coefficients stays. The norm is
not called: if it gets hooks or is replaced, the module runs its own forward.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import mix_streams, project_streams, sinkhorn
from liger_hf.passing import may_pass, passing, skipping
from liger_hf.patch import forward_of
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.norm.rule import eps_of
from liger_hf.stand_in import LENGTHS, Case, Draw, configuration, device_of, of_length, sized, twin_trial

NOTHING = (
    "no module has hyper-connections with a doubly stochastic matrix: none has fn, base, scale and a number of "
    "Sinkhorn iterations"
)
WEIGHTS = {"fn", "base", "scale"}
# Hidden size of the stand-in.
WIDTH = 16


def look(module: nn.Module) -> Found | None:
    weights, iterations = dict(module._parameters), _attribute(module, "sinkhorn_iters", int)
    eps, streams = _attribute(module, "eps", float), _streams(weights)
    if weights.keys() != WEIGHTS or iterations is None or eps is None or streams is None or len(module._modules) != 1:
        return None
    original = forward_of(module)
    if isinstance(original, str):
        return Found("sinkhorn", refusal=original)
    arguments = tuple(inspect.signature(original).parameters)[1:]
    if len(arguments) != 1:
        words = f"hyper-connections must take the streams alone, their forward takes ({', '.join(arguments)})"
        return Found("sinkhorn", refusal=words)
    fn: Any = weights["fn"]
    ((name, norm),) = module._modules.items()
    if norm is None or eps_of(norm) is None or next(norm.parameters(), None) is not None:
        return Found("sinkhorn", refusal=f"{name} must be a norm without weights, it is {type(norm).__name__}")
    if (reason := skipping([(name, norm)])) is not None:
        return Found("sinkhorn", refusal=reason)
    return Found(
        "sinkhorn",
        kind=(configuration(module), streams, fn.dtype, fn.device.type),
        original=original,
        candidates=lambda: [_candidate(original, arguments[0], name, iterations, eps)],
        cases=lambda device, dtypes: _cases(module, streams, device, dtypes),
        device=lambda: device_of(module),
        dtype=fn.dtype,
    )


def _attribute(module: nn.Module, suffix: str, kind: type) -> str | None:
    """Return the only attribute of this type whose name has this suffix, or None."""
    names = [name for name, value in vars(module).items() if name.endswith(suffix) and type(value) is kind]
    return names[0] if len(names) == 1 else None


def _streams(weights: dict[str, Any]) -> int | None:
    """Return the number n of streams, which have (2 + n) · n coefficients; None for weights of other shapes."""
    shapes = {name: tuple(value.shape) for name, value in weights.items() if isinstance(value, Tensor)}
    if shapes.keys() != WEIGHTS or shapes["scale"] != (3,) or len(shapes["fn"]) != 2:
        return None
    if shapes["base"] != shapes["fn"][:1]:
        return None
    n = next((n for n in range(1, 65) if (2 + n) * n == shapes["base"][0]), None)
    return n if n is not None and shapes["fn"][1] % n == 0 else None


def _candidate(original: Callable[..., Any], argument: str, norm: str, iterations: str, eps: str) -> Candidate:
    def forward(self: Any, *inputs: Tensor, **named: Tensor) -> Any:
        (x,) = inputs or (named.pop(argument),)
        n = _streams(self._parameters)
        if n is None or x.dim() != 4 or x.shape[2] != n or not may_pass(self):
            return original(self, x)
        sizes, least = [n, n, n * n], getattr(self, eps)
        child = getattr(self, norm)
        coefficients = project_streams(x, self.fn, getattr(child, str(eps_of(child)))).split(sizes, dim=-1)
        pre, post, matrix = (
            p * s + b for p, s, b in zip(coefficients, self.scale.unbind(), self.base.split(sizes), strict=True)
        )
        matrix = sinkhorn(matrix.unflatten(-1, (n, n)), getattr(self, iterations), least)
        return 2 * torch.sigmoid(post), matrix, mix_streams(x, torch.sigmoid(pre) + least)

    detail = "with project_streams and mix_streams"
    return Candidate(sinkhorn, detail, forward, lambda module: passing(module, forward, original))


def _cases(module: nn.Module, n: int, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    draw, count = Draw(device), (2 + n) * n
    weights = {
        "fn": draw.normal(count, n * WIDTH, scale=(n * WIDTH) ** -0.5),
        "base": draw.normal(count),
        "scale": draw.positive(3),
    }

    def drawn(*leading: int) -> tuple[Tensor, dict[str, Tensor]]:
        sizes = {"post": (n,), "matrix": (n, n), "mixed": (WIDTH,)}
        return draw.normal(*leading, n, WIDTH), {name: draw.normal(*leading, *size) for name, size in sizes.items()}

    x, upstream = drawn(2, 9)
    for name, dtype, scale in sized(dtypes):
        cast_weights = {key: value.to(dtype) for key, value in weights.items()}
        yield Case(name, dtype, twin_trial(module, {"x": (x * scale).to(dtype)}, upstream, cast_weights))
    for length in LENGTHS:
        x, upstream = drawn(1, length)
        yield of_length(length, torch.float32, twin_trial(module, {"x": x}, upstream, weights))


RULE = Rule("hyper_connection", look, ("sinkhorn",), NOTHING)
