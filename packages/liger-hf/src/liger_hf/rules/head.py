# SPDX-License-Identifier: Apache-2.0
"""Output head and loss: lazy logits between the two, so that all the logits of a batch never exist while training.

Three attributes of instances change: the head's forward (returns lazy logits while its model runs), the model's loss function
(takes them), and the model's forward (settles at its exit what nobody used).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from liger_core import linear_cross_entropy
from liger_hf.causal_loss import causal_lm_loss
from liger_hf.errors import LogitsError
from liger_hf.lazy_logits import Cell, LazyLogits
from liger_hf.patch import Patch, forward_of, replacement
from liger_hf.projection import version_of
from liger_hf.replica import Draw, device_of, replica
from liger_hf.verification import Candidate, Case, Found, Results

NOTHING = "no module is a model with an output head"
OP = "linear_cross_entropy"
CLASSES = 97


def look(module: nn.Module) -> Found | None:
    if not isinstance(module, PreTrainedModel):
        return None
    head: nn.Module | None = _head_of(module)
    if head is None or head not in list(module.children()):
        return None
    original, inner = forward_of(module), forward_of(head)
    if isinstance(original, str) or isinstance(inner, str):
        return Found(OP, refusal=original if isinstance(original, str) else f"the head: {inner}")
    # Some forwards compute their loss themselves; for those the check finds that the logits were read.
    if module.loss_function is not ForCausalLMLoss:
        name = getattr(module.loss_function, "__name__", type(module.loss_function).__name__)
        return Found(OP, refusal=f"its loss function must be ForCausalLMLoss, it is {name}")
    base = module.base_model_prefix
    if not base or base not in module._modules:
        return Found(OP, refusal="the hidden states of its head do not come from one base model")
    sizes = _sizes(head)
    if sizes is None:
        return Found(OP, refusal=f"its head ({type(head).__name__}) has no in_features and out_features")
    dtype = next((p.dtype for p in head.parameters() if p.is_floating_point()), torch.float32)
    return Found(
        OP,
        kind=(id(module),),
        original=original,
        candidates=lambda: (Candidate(linear_cross_entropy, "", patches, lambda model: patches(model, head)),),
        cases=lambda device, dtypes: _cases(module, head, sizes[0], device, dtypes),
        device=lambda: device_of(head),
        dtype=dtype,
    )


def _head_of(model: Any) -> nn.Module | None:
    head = model.get_output_embeddings()
    return head if isinstance(head, nn.Module) else None


def _sizes(head: nn.Module) -> tuple[int, int] | None:
    if isinstance(getattr(head, "in_features", None), int) and isinstance(getattr(head, "out_features", None), int):
        return head.in_features, head.out_features  # type: ignore[return-value]
    weight = getattr(head, "weight", None)
    return (weight.shape[1], weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def patches(model: nn.Module, head: nn.Module) -> list[Patch]:
    """What makes the logits of one model lazy."""
    sizes, inner, original = _sizes(head), forward_of(head), forward_of(model)
    assert sizes is not None
    assert not isinstance(inner, str)
    assert not isinstance(original, str)
    return [
        Patch(head, "liger_lazy", False),
        # In a list: as an attribute the head would become a second submodule.
        Patch(model, "liger_head", [head]),
        replacement(head, _head_forward(inner, sizes[1]), inner),
        Patch(model, "_loss_function", causal_lm_loss),
        replacement(model, _model_forward(original), original),
    ]


def _head_forward(original: Callable[..., Any], classes: int) -> Callable[..., Any]:
    def forward(self: nn.Module, x: Tensor, *args: Any, **options: Any) -> Any:
        if not self.__dict__.get("liger_lazy", False) or args or options:
            return original(self, x, *args, **options)
        autocast = (x.device.type, torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else None
        return LazyLogits(x, self, classes, x.dtype if autocast is None else autocast[1], Cell(version_of(self), autocast))

    return forward


def _model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, keep_logits: bool | None = None, **options: Any) -> Any:
        holder = self.__dict__.get("liger_head")
        if holder is None:
            # Undone, but still called by something that has wrapped this function since.
            return original(self, *args, **options)
        head = holder[0]
        lazy = head.liger_lazy
        head.liger_lazy = torch.is_grad_enabled() if keep_logits is None else True
        try:
            outputs = original(self, *args, **options)
        finally:
            head.liger_lazy = lazy
        keep = not (self.training and torch.is_grad_enabled()) if keep_logits is None else keep_logits
        return _settled(outputs, keep)

    return forward


def _settled(outputs: Any, keep: bool) -> Any:
    """Real logits where they are wanted or where no loss used them, made while the weights are still there."""
    if isinstance(outputs, tuple):
        return tuple(_real(value, keep) if isinstance(value, LazyLogits) else value for value in outputs)
    if isinstance(outputs, LazyLogits):
        return _real(outputs, keep)
    logits = outputs.get("logits") if hasattr(outputs, "get") else None
    if isinstance(logits, LazyLogits):
        # By item: an attribute of a ModelOutput that is set alone leaves the old value under its key.
        outputs["logits"] = _real(logits, keep)
    return outputs


def _real(logits: LazyLogits, keep: bool) -> Any:
    if keep or not logits.cell.used:
        return logits.materialize()
    logits.cell.open = False
    return logits


class _BaseOutput:
    """The output of a base model of which only the hidden states are of interest."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _BaseModel(nn.Module):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **options: Any) -> _BaseOutput:
        return _BaseOutput(self.hidden)


def _stand_in(model: PreTrainedModel, head: nn.Module, hidden: Tensor, layer: nn.Linear) -> Any:
    """The model with its own forward, but random hidden states and a small head; the vocabulary is as small."""
    name = next(name for name, child in model.named_children() if child is head)
    twin = replica(model, children={model.base_model_prefix: _BaseModel(hidden), name: layer})
    twin.config = copy.deepcopy(model.config)
    for config in (twin.config, twin.config.get_text_config()):
        config.vocab_size = CLASSES
    if "vocab_size" in twin.__dict__:
        twin.vocab_size = CLASSES
    twin.training = True
    return twin


def _cases(model: PreTrainedModel, head: nn.Module, width: int, device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    draw = Draw(device)
    layer = draw.linear(width, CLASSES, bias=getattr(head, "bias", None) is not None)
    hidden, labels = draw.normal(2, 9, width), draw.integers(CLASSES, 2, 9)
    labels[1, 3:5] = -100
    original = forward_of(model)
    for dtype in dtypes:
        yield Case(str(dtype).removeprefix("torch."), dtype, _run(model, head, layer, hidden.to(dtype), labels, original))


def _run(
    model: PreTrainedModel, head: nn.Module, layer: nn.Linear, hidden: Tensor, labels: Tensor, original: Any
) -> Callable[[Callable[..., Any], bool], Results]:
    def run(function: Callable[..., Any], exact: bool) -> Results:
        patched = function is not original
        wide = torch.float64 if exact else hidden.dtype
        values = {name: p.detach().to(hidden.dtype).to(wide) for name, p in layer.named_parameters()}
        leaf, small = hidden.to(wide).clone().requires_grad_(), replica(layer, parameters=values)
        twin = _stand_in(model, head, leaf, small)
        if patched:
            for patch in function(twin, small):
                patch.install()
        inputs = {"input_ids": labels.clamp(min=0), "labels": labels}
        forward = twin.forward if patched else lambda **named: original(twin, **named)
        outputs = forward(**inputs)
        if patched and not isinstance(outputs["logits"], LazyLogits):
            raise LogitsError("its forward must hand the logits to its loss function, it reads them itself")
        outputs["loss"].backward()
        gradients = {f"gradient of {name}": p.grad for name, p in small.named_parameters()}
        with torch.no_grad():
            scored = forward(**inputs)
        results = {"loss": outputs["loss"].detach(), "logits": outputs["logits"].detach(), "evaluated loss": scored["loss"]}
        return {**results, "evaluated logits": scored["logits"], "gradient of hidden": leaf.grad, **gradients}

    return run
