# SPDX-License-Identifier: Apache-2.0
"""Isolate a check from the precision, random state, hooks and modes of its process."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.modules import module as hooks_of_modules
from torch.overrides import TorchFunctionMode

from liger_core.private_names import replacing
from liger_core.private_torch import global_hooks, unset_fake_temporarily


class DoublePrecision(TorchFunctionMode):
    """Turn a module's casts to float32, and its new tensors, into float64 ones, for an exact run in float64."""

    def __enter__(self) -> Self:
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
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run a check undisturbed within this context.

    Gradients are enabled; autocast, fake tensors, global hooks and a default device are disabled. The random state is
    restored on exit.
    """
    devices = [] if device.type == "cpu" else [device]
    with (
        ExitStack() as stack,
        # A model may consist of fake tensors, to plan its memory; a check needs values.
        unset_fake_temporarily(),
        torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
        torch.autocast(device.type, enabled=False),
        # The generators of a check are on the CPU, whatever the default device is.
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for name in global_hooks():
            stack.enter_context(replacing(hooks_of_modules, name, OrderedDict()))
        torch.manual_seed(0)
        yield
