# SPDX-License-Identifier: Apache-2.0
"""Layers whose inputs are offloaded train to the same bits, and their inputs leave the device."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_core.errors import OptionError
from liger_train import checkpointing, offloading
from liger_train.checkpointing import Keeps

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 32, "num_hidden_layers": 4}


def model_on(device: torch.device, how: str) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1)).to(device).train()
    checkpointing.enable(model, how)
    return model


def step(model: Any) -> dict[str, Tensor]:
    """Gradients of two micro-batches."""
    model.zero_grad()
    torch.manual_seed(1)
    for tokens in torch.arange(96, device=model.device).remainder(32).view(2, 1, 48):
        model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


class Copies:
    """How often inputs of layers were copied, and how many of them were on the device at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = self.back = 0
        self.here: list[int] = []
        self.alive: list[Any] = []
        copy = offloading._Input._copy

        def counted(one: Any, target: Tensor, source: Tensor) -> None:
            copy(one, target, source)
            self.out, self.back = self.out + (target is one.host), self.back + (target is one.on_device)
            self.alive.append(one)
            self.here.append(self.on_the_device())

        monkeypatch.setattr(offloading._Input, "_copy", counted)

    def on_the_device(self) -> int:
        return len({id(each) for each in self.alive if each.on_device is not None})


@pytest.mark.parametrize(
    "kept",
    [
        (Keeps.NOTHING,) * 4,
        (Keeps.NOTHING, Keeps.INPUT, Keeps.NOTHING, Keeps.ALL),
        (Keeps.ALL, Keeps.NOTHING, Keeps.MATMULS, Keeps.NOTHING),
    ],
)
def test_offloaded_inputs_give_the_same_bits(kept: tuple[Keeps, ...], device: torch.device) -> None:
    expected = step(model_on(device, "none"))
    model, shared = model_on(device, "full"), offloading.Offloading()
    for layer, what in zip(checkpointing.layers(model), kept, strict=True):
        checkpointing.keep(layer, what, offloading=shared)
    for _ in range(2):
        assert_same(step(model), expected)


def test_every_input_is_copied_once_out_and_once_back_and_at_most_two_are_on_the_device(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    model, copies = model_on(device, "offload"), Copies(monkeypatch)
    step(model)
    # Two micro-batches of four layers.
    assert (copies.out, copies.back) == (8, 8)
    assert max(copies.here) == 2


def test_nothing_else_keeps_the_inputs_of_layers(device: torch.device) -> None:
    model = model_on(device, "offload")
    seen: list[Any] = []
    for layer in model.model.layers[1:]:
        layer.input_layernorm.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    loss = model(input_ids=torch.arange(32, device=device)[None], labels=torch.arange(32, device=device)[None]).loss
    gc.collect()
    assert len(seen) == SIZES["num_hidden_layers"] - 1
    assert [one() for one in seen] == [None] * len(seen)
    loss.backward()


def test_the_input_before_comes_back_while_a_layer_is_recomputed(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    model, copies, here = model_on(device, "offload"), Copies(monkeypatch), []
    layers = checkpointing.layers(model)
    for layer in layers:
        # Of its first module: since Transformers 5.23, hooks of the layer itself run outside the checkpoint, once.
        layer.input_layernorm.register_forward_pre_hook(lambda *_: here.append(copies.on_the_device()))
    step(model)
    # In the forward pass that of the layer itself; in the backward pass, where its own is already handed over, that of
    # the layer before.
    assert here == 2 * [1, 1, 1, 1, 1, 1, 1, 0]


def test_the_host_memory_is_free_after_the_backward_pass(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    made = []
    monkeypatch.setattr(offloading._Input, "__del__", lambda self: made.append(id(self)), raising=False)
    step(model_on(device, "offload"))
    gc.collect()
    assert len(made) == 8


def test_two_forward_passes_may_precede_their_backward_passes(device: torch.device) -> None:
    tokens = torch.arange(32, device=device).view(1, 32)

    def gradients(how: str) -> dict[str, Tensor]:
        model = model_on(device, how)
        torch.manual_seed(1)
        losses = [model(input_ids=each, labels=each).loss for each in (tokens, tokens.flip(1))]
        losses[0].backward()
        losses[1].backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    assert_same(gradients("offload"), gradients("none"))


def test_a_forward_pass_without_gradients_copies_nothing(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    model, copies = model_on(device, "offload"), Copies(monkeypatch)
    with torch.no_grad():
        model(input_ids=torch.arange(32, device=device).view(1, 32))
    assert copies.out == 0


class Shifted(GradientCheckpointingLayer):
    """A layer with a second tensor by position, which all layers share."""

    def forward(self, hidden_states: Tensor, shift: Tensor) -> Tensor:
        return hidden_states.sin() + shift


def test_only_the_first_argument_is_offloaded(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    layers, copies = nn.ModuleList(Shifted() for _ in range(3)), Copies(monkeypatch)
    shared = offloading.Offloading()
    for layer in layers:
        checkpointing.keep(layer, Keeps.NOTHING, offloading=shared)
    x, shift = (torch.randn(4, 5, device=device, requires_grad=True) for _ in range(2))
    hidden = x
    for layer in layers:
        hidden = layer(hidden, shift)
    hidden.sum().backward()
    assert copies.out == 3


def test_a_model_without_such_layers_is_refused() -> None:
    class Plain:
        supports_gradient_checkpointing = True

        def gradient_checkpointing_enable(self, options: Any) -> None: ...

        def modules(self) -> list[nn.Module]:
            return []

    with pytest.raises(OptionError, match="--checkpoint offload needs layers to checkpoint, got Plain"):
        checkpointing.enable(Plain(), "offload")
