# SPDX-License-Identifier: Apache-2.0
"""Small stand-ins of a module with random weights, so that a check touches neither the model nor the random state."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules import module as global_hooks
from torch.overrides import TorchFunctionMode

from liger_core import DeviceError

# What a module computes may depend on how many tokens there are. Besides a few tokens in every dtype, checks run on one, as while
# generating, and on more than any power of two by which modules tell long inputs from short ones, in float32.
LENGTHS = (1, 300)


def replica(
    module: nn.Module, *, parameters: Mapping[str, Tensor | None] | None = None, children: Mapping[str, nn.Module] | None = None
) -> Any:
    """A module of the same class and attributes, without hooks, with these parameters and children in place of its own."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for name in [
        n for n in twin.__dict__ if n.endswith("_hooks") or n.endswith("_hooks_with_kwargs") or n.endswith("_hooks_always_called")
    ]:
        twin.__dict__[name] = type(twin.__dict__[name])()
    for name in ("forward", "_old_forward", "_hf_hook"):
        twin.__dict__.pop(name, None)
    own = dict(module._parameters)
    for name, value in (parameters or {}).items():
        own[name] = None if value is None else nn.Parameter(value.clone())
    twin._parameters = own
    twin._buffers = dict(module._buffers)
    twin._modules = {**module._modules, **(children or {})}
    return twin


def configuration(module: nn.Module) -> tuple[Any, ...]:
    """What besides weights and children tells two instances of one class apart."""
    plain = (bool, int, float, str, type(None), torch.dtype)
    kept = {n: v for n, v in vars(module).items() if isinstance(v, plain) and n not in ("training", "layer_idx")}
    return tuple(sorted((n, repr(v)) for n, v in kept.items())) + tuple(
        sorted((n, getattr(v, "__qualname__", "")) for n, v in vars(module).items() if inspect.isroutine(v) and n != "forward")
    )


class Draw:
    """Random tensors of one seed; the same whatever the device, and the global generators stay as they are."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device)

    def positive(self, *shape: int) -> Tensor:
        """In [0.5, 1.5): a weight for which neither its sign nor an offset can go unnoticed."""
        return (torch.rand(shape, generator=self.generator) + 0.5).to(self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def linear(self, inputs: int, outputs: int, bias: bool) -> nn.Linear:
        layer = nn.Linear(inputs, outputs, bias=bias, device="meta")
        layer.weight = nn.Parameter(self.normal(outputs, inputs, scale=inputs**-0.5))
        if bias:
            layer.bias = nn.Parameter(self.normal(outputs, scale=0.1))
        return layer


class DoublePrecision(TorchFunctionMode):
    """Casts to float32 that a module makes inside become casts to float64, and so do its new tensors: its float64 run is exact."""

    def __enter__(self) -> DoublePrecision:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        torch.set_default_dtype(self.default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Hooks on all modules of the process see nothing of a check."""
    names = [name for name, value in vars(global_hooks).items() if name.startswith("_global_") and isinstance(value, dict)]
    before = {name: getattr(global_hooks, name) for name in names}
    for name in names:
        setattr(global_hooks, name, OrderedDict())
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(global_hooks, name, value)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Gradients are on, autocast is off, tensors are real, nobody's hooks run, and the random state afterwards is that of before."""
    devices = [] if device.type == "cpu" else [device]
    with (
        _without_global_hooks(),
        # A model may be made of fake tensors, to plan its memory; what is checked has values.
        unset_fake_temporarily(),
        torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.manual_seed(0)
        yield


def device_of(module: nn.Module) -> torch.device:
    """Where the module computes."""
    for parameter in module.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    # Weights that accelerate has offloaded come to where its hooks run the module or its children.
    for child in module.modules():
        hook = child.__dict__.get("_hf_hook")
        for part in getattr(hook, "hooks", (hook,)):
            runs_on = getattr(part, "execution_device", None)
            if runs_on is not None:
                return torch.device(runs_on)
    if next(module.parameters(), None) is not None:
        raise DeviceError(
            f"liger_hf.apply: the weights must be on a device where they can be used, those of {type(module).__name__} are on meta; "
            "load the weights first, or pass verify=False"
        )
    return torch.device("cpu")
