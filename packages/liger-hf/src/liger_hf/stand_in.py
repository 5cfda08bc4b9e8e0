# SPDX-License-Identifier: Apache-2.0
"""Small stand-ins of modules with random weights, and the cases that a check runs on them.

Every rule checks its candidates in the same way: it draws inputs and weights (`Draw`), makes a twin of the module with
these weights (`replica`), runs it forward and backward (`trial`), and `decide` compares the results.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from liger_core.private_names import replacing
from liger_hf.private_transformers import OFFLOADED, OFFLOADED_FORWARD
from liger_hf.repeated import MANAGED, is_setting

# Modules may treat few and many tokens differently. Besides a few tokens in every dtype, checks run in float32 on one
# token, as in generation, and on a sequence that every module treats as long.
LENGTHS = (1, 300)
# Moderate inputs reveal the curvature of an activation, large ones a limit on its values. Products of two must be
# finite in float16.
SCALES = {"moderate": 2.0, "large": 150.0}
SCALES_IN_FLOAT16 = SCALES | {"large": 40.0}
# Attributes of a module that do not count as settings; Module.compile() sets the last one.
OTHER_ATTRIBUTES = MANAGED | {"training", "layer_idx", "forward", "_compiled_call_impl"}


class Unfit(Exception):
    """A module is of another kind than its rule is for; the text is the reason in the report."""


Results = dict[str, Tensor]
Run = Callable[[Callable[..., Any], bool], Results]


@dataclass(frozen=True)
class Case:
    """One random input. `run(function, exact)` returns outputs and gradients by name, computed in float64 if exact."""

    name: str
    dtype: torch.dtype
    run: Run


def trial(
    call: Callable[..., Mapping[str, Any]],
    inputs: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor | None],
    weights: Mapping[str, Tensor] | None = None,
) -> Run:
    """Return a forward and backward pass of a function that replaces the module or part of it.

    call      (function, inputs, weights, cast) → outputs by name. It passes the function its arguments: twins of
              modules with these weights, and constants that `cast` converts to the precision of the run. An output may
              be a function without arguments, which is called after the backward pass
    inputs    tensors by name; gradients are computed for these and for the weights
    upstream  output → its upstream gradient, None for a scalar; other outputs are only compared
    """

    def run(function: Callable[..., Any], exact: bool) -> Results:
        cast: Callable[[Tensor], Tensor] = widened if exact else lambda tensor: tensor
        leaves = {name: cast(value).clone().requires_grad_() for name, value in inputs.items()}
        parameters = {name: nn.Parameter(cast(value).clone()) for name, value in (weights or {}).items()}
        outputs = call(function, leaves, parameters, cast)
        torch.autograd.backward(
            [outputs[name] for name in upstream],
            [None if grad is None else cast(grad).to(outputs[name].dtype) for name, grad in upstream.items()],
        )
        results = {name: (value() if inspect.isroutine(value) else value).detach() for name, value in outputs.items()}
        # An input without influence gets no gradient.
        gradients = {
            f"gradient of {name}": leaf.grad for name, leaf in (leaves | parameters).items() if leaf.grad is not None
        }
        return results | gradients

    return run


def widened(tensor: Tensor) -> Tensor:
    """Convert a tensor to double precision."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def sized(dtypes: Iterable[torch.dtype]) -> Iterator[tuple[str, torch.dtype, float]]:
    """Yield (name, dtype, scale) for inputs of several scales, which reveal nonlinearities."""
    for dtype in dtypes:
        for size, scale in (SCALES_IN_FLOAT16 if dtype == torch.float16 else SCALES).items():
            yield f"{str(dtype).removeprefix('torch.')}, {size} input", dtype, scale


class _Mode(threading.local):
    """The mode in which this thread runs checks.

    training  the training flag of new replicas; in training mode, a dropout that is written as a function is active
    draw      the number of the draw; each number gives different random tensors
    """

    def __init__(self) -> None:
        self.training = True
        self.draw = 0


MODE = _Mode()


def of_length(length: int, dtype: torch.dtype, run: Run) -> Case:
    """Return a case of one sequence with `length` tokens, which compares some rows, including the first and the last.

    A single token runs in evaluation mode, as in generation.
    """
    rows = sorted({*range(0, length, max(1, length // 8)), length - 1})

    def few(function: Callable[..., Any], exact: bool) -> Results:
        with replacing(MODE, "training", length > 1):
            results = run(function, exact)
        return {
            name: value[:, rows] if value.dim() > 2 and value.shape[1] == length else value
            for name, value in results.items()
        }

    words = f"{str(dtype).removeprefix('torch.')}, length {length}"
    return Case(words if length > 1 else f"{words}, in evaluation", dtype, few)


def row_cases(
    run: Callable[[Tensor, Tensor], Run], draw: "Draw", inputs: int, outputs: int, dtypes: Iterable[torch.dtype]
) -> Iterator[Case]:
    """Yield cases of `run(x, upstream)` for rows with these numbers of columns, of several scales and lengths."""
    x, upstream = draw.normal(2, 9, inputs), draw.normal(2, 9, outputs)
    for name, dtype, scale in sized(dtypes):
        yield Case(name, dtype, run((x * scale).to(dtype), upstream.to(dtype)))
    for length in LENGTHS:
        yield of_length(length, torch.float32, run(draw.normal(1, length, inputs), draw.normal(1, length, outputs)))


def replica(
    module: nn.Module,
    *,
    parameters: Mapping[str, Tensor | None] | None = None,
    children: Mapping[str, nn.Module] | None = None,
) -> Any:
    """Return a module of the same class and attributes, without hooks, with the given parameters and children."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            twin.__dict__[name] = type(value)()
    for name in ("forward", OFFLOADED_FORWARD, OFFLOADED):
        twin.__dict__.pop(name, None)
    merged = dict(module._parameters)
    for name, value in (parameters or {}).items():
        merged[name] = value if value is None or isinstance(value, nn.Parameter) else nn.Parameter(value.clone())
    twin._parameters = merged
    twin._buffers = dict(module._buffers)
    twin._modules = {**module._modules, **(children or {})}
    twin.training = MODE.training
    return twin


def twin_trial(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor | None],
    weights: Mapping[str, Tensor] | None = None,
) -> Run:
    """Return a `trial` of a function of the module, here a replica with these weights, and of the inputs."""

    def call(function: Callable[..., Any], leaves: Any, parameters: Any, cast: Any) -> dict[str, Any]:
        results = function(replica(module, parameters=parameters), *leaves.values())
        return dict(zip(upstream, results if isinstance(results, tuple) else (results,), strict=True))

    return trial(call, inputs, upstream, weights)


def configuration(module: nn.Module) -> tuple[Any, ...]:
    """Return what distinguishes modules besides their weights: class, settings, and the same of all children."""
    children = ((name, configuration(child)) for name, child in module._modules.items() if child is not None)
    return (type(module), settings(module), *children)


def settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the settings that distinguish two instances of one class, besides weights and children."""
    values = {n: v for n, v in vars(module).items() if n not in OTHER_ATTRIBUTES}
    chosen = {n: v for n, v in values.items() if is_setting(v) or isinstance(v, torch.dtype) or callable(v)}
    return tuple((name, _identity(chosen[name], module)) for name in sorted(chosen))


def _identity(value: Any, module: nn.Module) -> Any:
    """Return what distinguishes a setting from others; of a function, that is its code and the values that it uses."""
    if is_setting(value) or isinstance(value, torch.dtype):
        return repr(value)
    function = getattr(value, "__func__", value)
    if isinstance(value, functools.partial):
        code: tuple[Any, ...] = (_identity(value.func, module), len(value.args), *value.keywords)
        used = [*value.args, *value.keywords.values()]
    elif isinstance(function, FunctionType):
        code = (function.__code__, _Same(function.__globals__))
        used = [getattr(value, "__self__", None), *map(_contents, function.__closure__ or ())]
        used += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    else:
        return _Same(value)
    return (*code, *(None if each is module else repr(each) if is_setting(each) else _Same(each) for each in used))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The variable has no value.
        return cell


class _Same:
    """An object that equals nothing but itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Draw:
    """Draw random tensors from a seed and the draw number, the same on every device, without the global generators."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed + 1000 * MODE.draw)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device)

    def positive(self, *shape: int) -> Tensor:
        """Return a weight in [0.5, 1.5), which reveals both a wrong sign and an offset."""
        return (torch.rand(shape, generator=self.generator) + 0.5).to(self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def linear(self, inputs: int, outputs: int, bias: bool) -> nn.Linear:
        layer = nn.Linear(inputs, outputs, bias=bias, device="meta")
        layer.weight = nn.Parameter(self.normal(outputs, inputs, scale=inputs**-0.5))
        if bias:
            layer.bias = nn.Parameter(self.normal(outputs, scale=0.1))
        return layer


def weight_kind(module: nn.Module) -> tuple[torch.dtype, str]:
    """Return the dtype and the device of the module's first weight in floating point; float32 if it has none."""
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    return (torch.float32, "") if weight is None else (weight.dtype, str(weight.device))


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which the module computes; for weights on the meta device, where they are checked."""
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    # accelerate's hooks move offloaded weights to the device where they run the module or its children.
    for child in module.modules():
        hook = child.__dict__.get(OFFLOADED)
        for inner in getattr(hook, "hooks", (hook,)):
            runs_on = getattr(inner, "execution_device", None)
            if runs_on is not None:
                return torch.device(runs_on)
    return default_device() if next(module.parameters(), None) is not None else torch.device("cpu")


def default_device() -> torch.device:
    """Return the device of checks of weights on the meta device: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
