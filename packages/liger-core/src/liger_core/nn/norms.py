# SPDX-License-Identifier: Apache-2.0
"""Norms, and what takes their place, with their weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_core import checks, ops
from liger_core.docstrings import Entry
from liger_core.layout import Layout
from liger_core.nn.arguments import Parameter, arguments_of, bound, keywords, like, parameters_of, subclass
from liger_core.nn.described import CONSTRUCTOR, Section, docstring, of_call, rows_of
from liger_core.nn.module import Module, check_options, check_size, check_switches, meta
from liger_core.op import Op


class Norm(Module):
    """An op on rows with weights of their width: `module(rows)` is `op(rows, weights, eps, **options)`."""

    op: ClassVar[Op[..., Any]]
    rows: ClassVar[tuple[str, ...]]
    weights: ClassVar[tuple[str, ...]]
    signature: ClassVar[inspect.Signature]
    weight: Any

    def __init__(self, *inputs: Any, **named: Any) -> None:
        given = bound(type(self).__name__, self.signature, self.rows, inputs, named)
        place = {name: given.pop(name, None) for name in ("device", "dtype")}
        given.setdefault("eps", self.signature.parameters["eps"].default)
        super().__init__(**given)
        self.width, self.eps = given.pop("width"), given.pop("eps")
        affine, bias, self.options = given.pop("elementwise_affine", True), given.pop("bias", True), given
        check_switches(self, elementwise_affine=affine, bias=bias)
        present = [name for name in self.weights if affine and (bias or name != "bias")]
        check_size(self, width=self.width)
        check_options(self.op.check, [_smallest(self.op, self.width, (*self.rows, *present))], {"eps": self.eps, **given})
        for name in self.weights:
            self.register_parameter(name, nn.Parameter(torch.empty(self.width, **place)) if name in present else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rows are scaled by 1, and no bias is added."""
        for name, weight in self.named_parameters(recurse=False):
            nn.init.constant_(weight, 0.0 if name == "bias" else 1.0 - self.options.get("weight_offset", 0.0))

    def forward(self, *rows: Tensor, **named: Tensor) -> Any:
        weights = {name: getattr(self, name) for name in self.weights}
        return self.op(**arguments_of(self, self.rows, rows, named), **weights, eps=self.eps, **self.options)


def _smallest(op: Op[..., Any], width: int, names: Iterable[str]) -> dict[str, Tensor]:
    """A call of one row, without memory."""
    sizes = {name: re.findall(r"…|\(?\w+\)?", op.layout.arguments[name]) for name in names}  # type: ignore[union-attr]
    return {name: meta(*(width if size == "(width)" else 1 for size in dimensions)) for name, dimensions in sizes.items()}


def norm_module(name: str, op: Op[..., Any]) -> type[Norm]:
    """The class of an op on rows: its layout says which arguments are rows and which are weights of their width."""
    assert isinstance(op.layout, Layout)
    dimensions, parameters = op.layout.arguments, parameters_of(op)
    rows = tuple(argument for argument in dimensions if dimensions[argument] != "(width)")
    weights = tuple(argument for argument in dimensions if argument not in rows)
    options = keywords(p for p in parameters.values() if p.name not in dimensions and p.name != "eps")
    signature = inspect.Signature([_WIDTH, parameters["eps"], *_of_weights(weights), *options, *_PLACE])
    words = docstring(op, _sections(op, rows, weights, [p.name for p in options]))
    made: type[Norm] = subclass(name, Norm, words, signature, op=op, rows=rows, weights=weights)
    return made


_WIDTH = Parameter("width", Parameter.POSITIONAL_OR_KEYWORD, annotation=int)
_PLACE = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind | None)
    for name, kind in (("device", torch.device | str), ("dtype", torch.dtype))
]


def _of_weights(weights: tuple[str, ...]) -> list[Parameter]:
    """The switches of what there is."""
    names = [*(["elementwise_affine"] if weights else []), *(["bias"] if "bias" in weights else [])]
    return [Parameter(name, Parameter.KEYWORD_ONLY, default=True, annotation=bool) for name in names]


def _sections(op: Op[..., Any], rows: tuple[str, ...], weights: tuple[str, ...], options: list[str]) -> list[Section]:
    """What goes to the constructor, what to the call, and the parameters."""

    def row(name: str, text: str) -> Entry:
        return Entry((name,), (text,))

    of_constructor = [row("width", "columns of a row, the size of its last dimension"), *rows_of(op, ["eps"])]
    switches = {"elementwise_affine": f"False for no {' and no '.join(weights)}", "bias": "False for no bias"}
    of_constructor += [row(p.name, switches[p.name]) for p in _of_weights(weights)]
    of_constructor += [
        *rows_of(op, options),
        Entry(("device", "dtype"), ("of the parameters" if weights else "unused: it has no parameters",)),
    ]
    weight = "1 - weight_offset at first, so that rows are scaled by 1" if "weight_offset" in options else "1 at first"
    parameters = [row(name, f"(width,)  {'0 at first' if name == 'bias' else weight}") for name in weights]
    found = [Section(CONSTRUCTOR, of_constructor), of_call(op, rows)]
    return [*found, Section("Parameters:", parameters)] if weights else found


RMSNorm = norm_module("RMSNorm", ops.rms_norm)
AddRMSNorm = norm_module("AddRMSNorm", ops.add_rms_norm)
LayerNorm = norm_module("LayerNorm", ops.layer_norm)
AddLayerNorm = norm_module("AddLayerNorm", ops.add_layer_norm)
GatedRMSNorm = norm_module("GatedRMSNorm", ops.gated_rms_norm)
ModulatedRMSNorm = norm_module("ModulatedRMSNorm", ops.modulated_rms_norm)
ModulatedLayerNorm = norm_module("ModulatedLayerNorm", ops.modulated_layer_norm)


class GroupNorm(nn.GroupNorm):
    """torch's module with the op `group_norm`: neighboring channels of a sample, scaled together.

    num_groups     a divisor of num_channels
    num_channels   the size of the second dimension
    eps            added to the variance, in the units of x²; > 0
    affine         False for no weight and no bias
    bias           False for no bias, where torch has this option
    device, dtype  of the parameters, weight (num_channels,), 1 at first, and bias (num_channels,), 0 at first

    The call takes x (samples, channels, …) and returns it normalized, dense: of a channels_last x, too, as torch does on a GPU.
    """

    @like(nn.GroupNorm)
    def __init__(self, *sizes: Any, **options: Any) -> None:
        given = inspect.signature(nn.GroupNorm).bind(*sizes, **options)
        given.apply_defaults()
        groups, channels, eps = (given.arguments[name] for name in ("num_groups", "num_channels", "eps"))
        check_size(self, num_groups=groups, num_channels=channels)
        ops.group_norm.check(meta(1, channels), groups, eps=eps)
        super().__init__(*sizes, **options)

    def forward(self, x: Tensor) -> Tensor:
        return ops.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class PolyNorm(Module):
    """An activation: the first three powers of x, each scaled to unit root mean square over its row, and summed; see `poly_norm`.

    eps            added to the mean square of each power; > 0
    device, dtype  of the parameters

    weight  (3,)  1/3 at first, as in the paper; the factor of the cube comes first
    bias    (1,)  0 at first

    The call takes x (..., width), of any width, and returns the same shape and dtype.
    """

    def __init__(self, *, eps: float = 1e-6, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(eps=eps)
        ops.poly_norm.check(meta(1, 1), meta(3), meta(1), eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.poly_norm(x, self.weight, self.bias, self.eps)


class DyT(Module):
    """tanh(alpha · x) · weight + bias, for the place of a norm; see `dyt`.

    width          columns of a row, the size of its last dimension
    alpha          what the parameter of this name is at first; 0.5 as in the paper
    bias           False for no bias
    device, dtype  of the parameters: alpha (1,), weight (width,), 1 at first, and bias (width,), 0 at first

    The call takes x (..., width) and returns the same shape and dtype.
    """

    def __init__(
        self,
        width: int,
        alpha: float = 0.5,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width=width, alpha=alpha, bias=bias)
        check_size(self, width=width)
        check_switches(self, bias=bias)
        checks.finite("DyT", "alpha", alpha)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.first_alpha = alpha
        self.alpha = nn.Parameter(torch.empty(1, **place))
        self.weight = nn.Parameter(torch.empty(width, **place))
        self.bias = nn.Parameter(torch.empty(width, **place)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.first_alpha)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.dyt(x, self.alpha, self.weight, self.bias)
