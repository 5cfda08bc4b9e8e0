# SPDX-License-Identifier: Apache-2.0
"""The weights that an output head was called with, and whether logits can still be computed from them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from liger_core.private_torch import FSDP_STATE
from liger_hf.errors import LogitsError
from liger_hf.private_transformers import OFFLOADED
from liger_hf.rules.head.tensor_parallel import over_classes


class CalledHead(threading.local):
    """The head that this thread is calling, whose hooks have gathered the weights."""

    def __init__(self) -> None:
        self.head: nn.Module | None = None


HELD = CalledHead()


@contextmanager
def held(head: nn.Module) -> Iterator[None]:
    """Mark the head as being called within this context, which may also be the backward pass of a call.

    Modules inside it do not gather their weights again.
    """
    before, HELD.head = HELD.head, head
    calls = [(module, module._compiled_call_impl) for module in gathering(head) if module is not head]
    for module, _ in calls:
        # torch calls this attribute instead of hooks and forward.
        module._compiled_call_impl = module.forward
    try:
        yield
    finally:
        HELD.head = before
        for module, call in calls:
            module._compiled_call_impl = call


def gathering(head: nn.Module) -> list[nn.Module]:
    """Return the modules whose calls gather a head's weights; under ZeRO-3 also adapters, which have their own."""
    # PEFT keeps the original of a layer that it trains a copy of, and does not call it.
    copied: Any = getattr(head, "original_module", None)
    is_unused = isinstance(copied, nn.Module) and not getattr(head, "disable_adapters", False)
    unused = {*copied.modules()} if is_unused else set()
    sharded = [m for m in head.modules() if any(hasattr(p, "ds_id") for p in m.parameters(recurse=False))]
    return [m for m in sharded if m not in unused] or [head]


def gathered(head: nn.Module) -> bool:
    """Return whether the head's weights are whole only during its calls, as under ZeRO-3, and none is running."""
    spread = not over_classes(head)
    return HELD.head is not head and any(
        hasattr(p, "ds_id") or (spread and hasattr(p, "full_tensor")) or p.is_meta for p in head.parameters()
    )


def loads_its_weights(head: nn.Module) -> bool:
    """Return whether hooks on the head itself load its weights for each call: it is offloaded, or sharded by itself."""
    return reloads_weights(head) or hasattr(head, FSDP_STATE)


def reloads_weights(head: nn.Module) -> bool:
    """Return whether hooks load the head's weights again when its logits are computed after the call."""
    hook = head.__dict__.get(OFFLOADED)
    offloaded = any(getattr(inner, "offload", False) for inner in getattr(hook, "hooks", (hook,)))
    return offloaded or any(hasattr(p, "ds_id") for p in head.parameters())


class HeadWeights:
    """The parameters and buffers of a head during one call, including those of adapters and of functional_call.

    versions  their version counters; None in compiled code
    stepped   whether an optimizer has updated one of them since; a fused optimizer does not change the version counter
    """

    def __init__(self, head: nn.Module) -> None:
        self.tensors = _tensors(head)
        self.forms = self._forms()
        self.versions: list[int] | None = None
        self.stepped = False
        if not torch.compiler.is_compiling():
            self.versions = self._versions()
            OPTIMIZERS.watch(self)

    def _versions(self) -> list[int]:
        return [0 if p.is_inference() else p._version for p in self.tensors.values()]

    def _forms(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(t.dtype, t.device) for t in self.tensors.values()]

    def are_in(self, head: nn.Module) -> bool:
        """Return whether the head still has exactly these tensors."""
        now = _tensors(head)
        return now.keys() == self.tensors.keys() and all(now[name] is tensor for name, tensor in self.tensors.items())

    def check(self, head: nn.Module) -> None:
        """Raise LogitsError if these weights have changed since the call."""
        if any(map(_freed, self.tensors.values())) or (gathered(head) and not self.are_in(head)):
            state = "has been sharded"
        elif self.stepped or (self.versions is not None and self.versions != self._versions()):
            state = "has been updated"
        elif self.forms != self._forms():
            state = "has been cast or moved"
        else:
            return
        raise LogitsError(
            f"logits: they must be read before the weight of the output head changes, it {state} since the forward "
            "pass; read outputs.logits before optimizer.step(), or call the model with keep_logits=True"
        )


def _tensors(head: nn.Module) -> dict[str, Tensor]:
    return {**dict(head.named_parameters()), **dict(head.named_buffers())}


def _freed(tensor: Tensor) -> bool:
    """Return whether this is a whole weight that FSDP has freed."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return False
    return tensor.numel() > 0 and not tensor.untyped_storage().size()


class Optimizers:
    """Mark the weights of calls whose logits are still referenced when an optimizer of torch updates them."""

    def __init__(self) -> None:
        self.calls: WeakSet[HeadWeights] = WeakSet()
        self.lock = threading.Lock()
        self.hook: RemovableHandle | None = None

    def watch(self, weights: HeadWeights) -> None:
        with self.lock:
            self.calls.add(weights)
            if self.hook is None:
                self.hook = register_optimizer_step_post_hook(self._stepped)

    def release(self) -> None:
        """Remove the hook from torch if there is nothing to watch; the next call installs it again."""
        with self.lock:
            if self.hook is not None and not self.calls:
                self.hook.remove()
                self.hook = None

    def _stepped(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        # A compiled step changes the version counters of the parameters.
        if torch.compiler.is_compiling() or not self.calls:
            return
        updated = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        with self.lock:
            for call in self.calls:
                call.stepped = call.stepped or any(id(p) in updated for p in call.tensors.values())


OPTIMIZERS = Optimizers()
