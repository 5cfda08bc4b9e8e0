# SPDX-License-Identifier: Apache-2.0
"""Run a model's own forward with random hidden states and a small head, to check its loss with lazy logits."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from liger_core.private_torch import FakeTensor
from liger_hf.errors import LogitsError
from liger_hf.patch import Patch, own_forward
from liger_hf.rules.head.lazy_logits import LazyLogits
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, Unfit, of_length, replica, trial

CLASSES = 97
# Modules between the base model and the head are copied, to run in another dtype, up to this many parameters.
SMALL = 1 << 24
# Outputs of the base model that a config may request besides hidden states.
OTHER_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


def cases(
    model: PreTrainedModel, path: str, sizes: tuple[int, int], device: torch.device, dtypes: Iterable[torch.dtype]
) -> Iterator[Case]:
    """Yield the cases of a model with a loss.

    path   the name of the head in the model
    sizes  the numbers of the head's inputs and outputs
    """
    draw = Draw(device)
    head = model.get_submodule(path)
    layer = draw.linear(sizes[0], CLASSES, bias=getattr(head, "bias", None) is not None)
    labels = draw.integers(CLASSES, 2, 9)
    labels[1, 3:5] = -100
    width = _width(model, path, sizes, layer, labels)
    hidden = draw.normal(2, 9, width)
    for dtype in dtypes:
        run = _run(model, path, sizes[1], layer, hidden.to(dtype), labels)
        yield Case(str(dtype).removeprefix("torch."), dtype, run)
    length = max(LENGTHS)
    run = _run(model, path, sizes[1], layer, draw.normal(1, length, width), draw.integers(CLASSES, 1, length))
    yield of_length(length, torch.float32, run)


def _width(model: PreTrainedModel, path: str, sizes: tuple[int, int], layer: nn.Linear, labels: Tensor) -> int:
    """Return the width of the hidden states, which is the head's unless there is a projection between them."""
    stated = getattr(model.config.get_text_config(), "hidden_size", sizes[0])
    if stated == sizes[0]:
        return sizes[0]
    try:
        hidden = torch.zeros(2, 9, sizes[0], device=labels.device)
        with torch.no_grad():
            forward: Any = own_forward(model)
            forward(_stand_in(model, path, sizes[1], hidden, layer), input_ids=labels.clamp(min=0))
    except RuntimeError:
        return int(stated)
    return sizes[0]


def _run(model: PreTrainedModel, path: str, classes: int, layer: nn.Linear, hidden: Tensor, labels: Tensor) -> Run:
    original: Any = own_forward(model)
    arguments = {"input_ids": labels.clamp(min=0), "labels": labels}

    def call(function: Callable[..., Sequence[Patch]], inputs: Any, weights: Any, cast: Any) -> dict[str, Any]:
        patched, small = function is not original, replica(layer, parameters=weights)
        twin = _stand_in(model, path, classes, inputs["hidden"], small)
        if patched:
            for patch in function(twin, small):
                patch.install()
        forward = twin.forward if patched else lambda **named: original(twin, **named)
        outputs = forward(**arguments)
        if not (isinstance(outputs, Mapping) and outputs.keys() >= {"loss", "logits"}):
            raise Unfit(
                f"the model must return an output with `.loss` and `.logits`, it returns {type(outputs).__name__}"
            )
        if patched and not isinstance(outputs["logits"], LazyLogits):
            raise LogitsError("its forward must hand the logits to its loss function, it reads them itself")
        scored: dict[str, Tensor] = {}

        def evaluated(name: str) -> Tensor:
            with torch.no_grad():
                scored.update({} if scored else forward(**arguments))
            return scored[name]

        results = {"loss": outputs["loss"], "logits": lambda: outputs["logits"]}
        return {**results, "evaluated loss": lambda: evaluated("loss"), "evaluated logits": lambda: evaluated("logits")}

    weights = {name: p.detach().to(hidden.dtype) for name, p in layer.named_parameters()}
    return trial(call, {"hidden": hidden}, {"loss": None}, weights)


def _stand_in(model: PreTrainedModel, path: str, classes: int, hidden: Tensor, layer: nn.Module) -> Any:
    """Return the model with its own forward, but random hidden states, a small head and a small vocabulary."""
    head, top = model.get_submodule(path), path.split(".")[0]
    children: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if child is head:
            children[name] = layer
        elif name == top or not isinstance(child, PreTrainedModel):
            in_head = sum(p.numel() for p in head.parameters()) if name == top else 0
            if sum(p.numel() for p in child.parameters()) - in_head <= SMALL:
                # The memo replaces the head, which is not copied, and tensors without values.
                copied = copy.deepcopy(child, {id(head): layer, **_values(child, head, hidden.device)})
                children[name] = copied.to(hidden.device, hidden.dtype)
        else:
            children[name] = _BaseModel(child, hidden)
    twin = replica(model, children=children)
    twin.config = copy.deepcopy(model.config)
    for config in (twin.config, twin.config.get_text_config()):
        # The stand-in returns only hidden states, and the check reads outputs by name.
        for name in OTHER_OUTPUTS:
            setattr(config, name, False)
        config.return_dict = True
        for name, value in list(vars(config).items()):
            if name.endswith("vocab_size") and value == classes:
                setattr(config, name, CLASSES)
    copies = [child for child in children.values() if not isinstance(child, _BaseModel)]
    for module in (twin, *(module for child in copies for module in child.modules())):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.shape[-1:] == (classes,):
                row = torch.linspace(-1, 1, CLASSES, device=hidden.device).to(hidden.dtype)
                module._buffers[name] = row.expand(*buffer.shape[:-1], CLASSES)
        for name, value in list(vars(module).items()):
            if isinstance(value, int) and not isinstance(value, bool) and value == classes:
                module.__dict__[name] = CLASSES
            elif isinstance(value, PretrainedConfig) and value is model.config:
                module.__dict__[name] = twin.config
    twin.training = True
    return twin


def _values(module: nn.Module, head: nn.Module, device: torch.device) -> dict[int, Tensor]:
    """Return fixed values for fake and meta tensors of a module, except its head, by their identities."""
    owners = {*module.modules()} - {*head.modules()}
    tensors = [t for owner in owners for t in (*owner._parameters.values(), *owner._buffers.values()) if t is not None]
    values = {id(t): (t, _numbers(t, device)) for t in tensors if isinstance(t, FakeTensor) or t.is_meta}
    return {key: nn.Parameter(new) if isinstance(t, nn.Parameter) else new for key, (t, new) in values.items()}


def _numbers(like: Tensor, device: torch.device) -> Tensor:
    """Return the same values in every run of a check, whatever the dtype; rows of matrices have about unit length."""
    values = torch.arange(like.numel(), device=device).remainder(8191).mul(0.7).sin().bfloat16().reshape(like.shape)
    return (values / 2 + 1 if like.dim() < 2 else values / like.shape[-1] ** 0.5).bfloat16().to(like.dtype)


class _BaseOutput:
    """The output of a base model that has only hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index > 0:
            raise Unfit(f"its head must get output 0 of the base model, its forward uses output {index}")
        return (self.last_hidden_state,)[index]


class _BaseModel(nn.Module):
    """A base model that returns the hidden states for any call, as do its children; other attributes are unchanged."""

    def __init__(self, real: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        # In __dict__, because a submodule would be moved and cast.
        self.__dict__["real"] = real
        self.hidden = hidden

    def forward(self, *args: Any, **options: Any) -> _BaseOutput:
        return _BaseOutput(self.hidden)

    def __getattr__(self, name: str) -> Any:
        return self._part(getattr(self.__dict__["real"], name))

    def __getitem__(self, key: Any) -> Any:
        return self._part(self.real[key])

    def __iter__(self) -> Iterator[Any]:
        return map(self._part, self.real)

    def __len__(self) -> int:
        return len(self.real)

    def __bool__(self) -> bool:
        return bool(self.real)

    def _part(self, value: Any) -> Any:
        return _BaseModel(value, self.hidden) if isinstance(value, nn.Module) else value
