# SPDX-License-Identifier: Apache-2.0
"""LM head and loss, with lazy logits between the two: in training, the logits of a whole batch are never materialized.

Three attributes of instances change: the head's forward returns lazy logits while its model runs, the model's loss
function takes them, and the model's forward computes unused ones before it returns.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_core import linear_cross_entropy
from liger_core.private_torch import IS_FSDP, has_global_backward_hook, interpreter_stack, is_exporting
from liger_hf.patch import Patch, forward_of, own_forward, replacement, under_autocast
from liger_hf.private_transformers import LOSS
from liger_hf.rule import Candidate, Found, Rule
from liger_hf.rules.head.call import HeadCall
from liger_hf.rules.head.causal_loss import MODEL_LOSSES
from liger_hf.rules.head.check import cases
from liger_hf.rules.head.deferred_logits import DeferredLogits
from liger_hf.rules.head.lazy_logits import LazyLogits
from liger_hf.rules.head.projection import LAZY, ModelForward
from liger_hf.rules.head.tensor_parallel import AROUND, SHARDED, ShardedHead, sharded_head
from liger_hf.rules.head.weights import gathered, loads_its_weights
from liger_hf.stand_in import device_of

NOTHING = "no module is a model with an output head"
OP = "linear_cross_entropy"
# The attribute of a patched model that holds its head.
HEAD = "liger_head"


def look(module: nn.Module) -> Found | None:
    if not isinstance(module, PreTrainedModel):
        return None
    head, path = _head_of(module)
    if head is None:
        return None
    models = ((name, child) for name, child in module.named_modules() if isinstance(child, PreTrainedModel))
    inner = next((name for name, child in models if child is not module and _head_of(child)[0] is head), None)
    if inner is not None:
        return Found(OP, refusal=f"its head belongs to {inner}, a separate model")
    original, sharded = own_forward(module), sharded_head(head)
    projection = forward_of(head) if sharded is None else sharded
    if isinstance(original, str) or isinstance(projection, str):
        return Found(OP, refusal=original if isinstance(original, str) else f"the head: {projection}")
    if not _has_loss(original):
        return Found(OP, refusal="its forward has neither labels nor a loss")
    # Some forwards compute their loss themselves; the check shows whether they read the logits.
    if _loss_of(module) not in MODEL_LOSSES:
        name = getattr(module.loss_function, "__name__", type(module.loss_function).__name__)
        losses = " or ".join(f.__name__ for f in MODEL_LOSSES)
        return Found(OP, refusal=f"its loss function must be {losses}, it is {name}")
    sizes = _sizes(head)
    if sizes is None:
        return Found(OP, refusal=f"its head ({type(head).__name__}) has no in_features and out_features")
    dtype = next((p.dtype for p in head.parameters() if p.is_floating_point()), torch.float32)
    detail = sharded.share(sizes[1]) if isinstance(sharded, ShardedHead) else ""
    return Found(
        OP,
        kind=(module,),
        original=original,
        candidates=lambda: (Candidate(linear_cross_entropy, detail, patches, lambda model: patches(model, head)),),
        cases=lambda device, dtypes: cases(module, path, sizes, device, dtypes),
        device=lambda: device_of(head),
        dtype=dtype,
    )


def _head_of(model: Any) -> tuple[nn.Module | None, str]:
    """Return the output head, and its name in the model."""
    try:
        head = model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None, ""
    return next(((module, name) for name, module in model.named_modules() if module is head and name), (None, ""))


def _has_loss(forward: Callable[..., Any]) -> bool:
    """Return whether a forward names labels or a loss as an argument, attribute or key."""
    inner: Any = inspect.unwrap(forward)
    code = getattr(inner, "__code__", None)
    if code is None:
        return True
    # Without the docstring.
    keys = (value for value in code.co_consts if isinstance(value, str) and "\n" not in value)
    words = (*code.co_varnames, *code.co_names, *keys)
    return any("label" in word or "loss" in word for word in words)


def _loss_of(model: Any) -> Any:
    """Return the loss function of a model, or the original of ours, which an unpickled model has."""
    loss = model.loss_function
    return next((original for original, ours in MODEL_LOSSES.items() if loss is ours), loss)


def _sizes(head: nn.Module) -> tuple[int, int] | None:
    if isinstance(getattr(head, "in_features", None), int) and isinstance(getattr(head, "out_features", None), int):
        return head.in_features, head.out_features  # type: ignore[return-value]
    weight = getattr(head, "weight", None)
    return (weight.shape[1], weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def patches(model: nn.Module, head: nn.Module) -> list[Patch]:
    """Return the patches that make the logits of one model lazy."""
    sizes, sharded, original = _sizes(head), sharded_head(head), under_autocast(model) or forward_of(model)
    inner = sharded.forward if isinstance(sharded, ShardedHead) else forward_of(head)
    assert sizes is not None
    assert not isinstance(inner, str)
    assert not isinstance(original, str)
    return [
        # In a list, because as an attribute the head would become a second submodule.
        Patch(model, HEAD, [head]),
        *([Patch(head, SHARDED, True)] if isinstance(sharded, ShardedHead) else []),
        replacement(head, _head_forward(inner, sizes[1]), inner),
        Patch(model, LOSS, MODEL_LOSSES[_loss_of(model)]),
        replacement(model, _model_forward(original), original),
    ]


def notes(model: nn.Module, patches: Iterable[Patch]) -> Iterator[str]:
    """Yield a sentence for each patched head whose backward hooks need the full logits."""
    heads = [patch.value[0] for patch in patches if patch.attribute == HEAD]
    for name, module in model.named_modules():
        if any(module is head for head in heads) and (module._backward_hooks or module._backward_pre_hooks):
            yield f"{name} has a backward hook, so the full logits are computed. Remove the hook to save their memory."


def _head_forward(original: Callable[..., Any], classes: int) -> Callable[..., Any]:
    def forward(self: nn.Module, x: Tensor, *args: Any, **options: Any) -> Any:
        if LAZY.head is not self or args or options or _needs_logits(self):
            return original(self, x, *args, **options)
        if hasattr(x, "device_mesh"):
            warnings.warn(AROUND, stacklevel=2)
            return original(self, x)
        kind = x.device.type
        autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        dtype = x.dtype if autocast is None else autocast[1]
        return LazyLogits(x, self, classes, dtype, HeadCall(x, self, autocast), constant=not torch.is_grad_enabled())

    return forward


def _model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: nn.Module, *args: Any, keep_logits: bool | None = None, skip_logits: bool | None = None, **options: Any
    ) -> Any:
        holder = self.__dict__.get(HEAD)
        if holder is None:
            # The patch was undone, but other code has wrapped this function and still calls it.
            return original(self, *args, **options)
        if skip_logits and keep_logits is None:
            # The argument of a Trainer with use_liger_kernel=True when it evaluates only the loss.
            keep_logits = False
        head = holder[0]
        # A Trainer evaluates. It may want only the loss, and reads the logits at once or never.
        defer = (
            keep_logits is None
            and not torch.is_grad_enabled()
            and "num_items_in_batch" in options
            and not (torch.compiler.is_compiling() or _sharded(head))
        )
        # An exported program returns tensors.
        lazy = (torch.is_grad_enabled() or defer or keep_logits is not None) and not is_exporting()
        running = None if torch.compiler.is_compiling() else ModelForward()
        before = LAZY.head, LAZY.forward
        LAZY.head, LAZY.forward = head if lazy else None, running
        try:
            try:
                outputs = original(self, *args, **options)
            finally:
                LAZY.head, LAZY.forward = before
            keep = not (self.training and torch.is_grad_enabled()) if keep_logits is None else keep_logits
            return _settled(outputs, keep, defer)
        finally:
            # Also for logits that are not returned but were kept by hooks.
            if running is not None:
                running.runs = False

    return forward


def _needs_logits(head: nn.Module) -> bool:
    """Return whether hooks or transforms need the head's real output, or would see a later call of it."""
    if head._backward_hooks or head._backward_pre_hooks or has_global_backward_hook():
        return True
    if not torch.compiler.is_compiling() and interpreter_stack() is not None:
        return True
    # A later call runs the modules in the head, and the head itself if only its hooks can load its weights.
    again = [child for child in head.modules() if child is not head] if head._modules else []
    return any(map(_hooked, [head, *again] if gathered(head) or loads_its_weights(head) else again))


# Packages whose hooks only load weights.
INFRASTRUCTURE = ("accelerate", "deepspeed", "torch")


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    functions = (getattr(hook, "func", hook) for some in hooks for hook in some.values())
    return any((getattr(f, "__module__", None) or "").partition(".")[0] not in INFRASTRUCTURE for f in functions)


def _sharded(head: nn.Module) -> bool:
    """Return whether FSDP, ZeRO-3 or offloading may free the head's weights before the logits are read."""
    return gathered(head) or getattr(head, IS_FSDP, False)


def _settled(outputs: Any, keep: bool, defer: bool) -> Any:
    """Return the outputs with real logits if they are wanted or no loss used them, while the weights still exist."""
    if isinstance(outputs, tuple):
        return tuple(_real(value, keep, defer) if isinstance(value, LazyLogits) else value for value in outputs)
    if isinstance(outputs, LazyLogits):
        return _real(outputs, keep, defer)
    # Models with several heads, such as for several tokens, return other lazy logits beside "logits".
    for name, value in list(outputs.items()) if hasattr(outputs, "items") else ():
        if isinstance(value, LazyLogits):
            # By item, because setting an attribute of a ModelOutput leaves the old value under its key.
            outputs[name] = _real(value, keep, defer)
    return outputs


def _real(logits: LazyLogits, keep: bool, defer: bool) -> Any:
    if defer and logits.call.used and logits.real is None:
        logits.call.closed = True
        return DeferredLogits(logits)
    if keep or not logits.call.used:
        return logits.materialize()
    logits.call.closed = True
    return logits


RULE = Rule("head", look, ("linear_cross_entropy",), NOTHING)
