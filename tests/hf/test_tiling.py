# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs in tiles of rows: as accurate as the whole ones, in the memory of a tile, with one gradient for each
weight."""

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import liger_hf
from hf import tiny_models
from hf.test_verification import Odd, Unit, by_child, same
from hf.tiny_models import (
    LAYERS,
    LargestResult,
    assert_same_step,
    checkpoint_layers,
    make,
    module_disagreements,
    recorded,
    step,
    step_disagreements,
    tokens,
    twin,
)
from hf.two_ranks import WAYS, Expected, batch, on_two_ranks, one_of_ranks
from liger_core import GradientError, OptionError
from liger_hf.tiling import _TiledCall
from liger_train import checkpointing

pytestmark = pytest.mark.slow

# 22 rows: tiles of 8, 8 and 6.
ROWS, TILES = 8, 3


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=tiny_models.DEVICE)


def tiled(model: Any, rows: int = ROWS, **options: Any) -> Any:
    model = twin(model)
    liger_hf.apply(model, mlp_rows=rows, **options)
    return model


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_a_model_with_tiles_is_as_accurate_as_without(architecture: str) -> None:
    model = make(architecture).train()
    alone = tiled(model, only=())
    assert alone.liger_report.notes[-1] == f"{LAYERS} gated MLPs compute at most {ROWS} rows at once."
    assert not alone.liger_report.replaced
    assert step_disagreements(alone, model) == {}
    assert step_disagreements(tiled(model), model) == {}


@pytest.mark.parametrize("ops", [{}, {"only": ()}], ids=["with Liger's ops", "without"])
@pytest.mark.parametrize("architecture", ["gemma2", "phi3"])
def test_in_bfloat16_tiles_are_as_accurate_as_the_whole(architecture: str, ops: dict[str, Any]) -> None:
    model = make(architecture, torch.bfloat16).train()
    x = torch.randn(2, 100, 64, generator=torch.Generator().manual_seed(3)).to(tiny_models.DEVICE, torch.bfloat16)
    ours, plain = (each.model.layers[0].mlp for each in (tiled(model, **ops), model))
    assert module_disagreements(ours, plain, x) == {}


def test_no_tensor_has_the_rows_of_all_tokens_and_the_width_of_the_mlp() -> None:
    wide = make(intermediate_size=5 * 64, vocab_size=20).train()
    inputs = {name: ids % 20 for name, ids in tokens(batch=2, length=32).items()}
    largest = {}
    for rows in (8, 64):
        model = tiled(wide, rows, only=())
        with LargestResult() as found:
            step(model, **inputs)
        largest[rows] = found.elements
    # A gradient of a weight is as large as 64 rows of the MLP.
    weight = 5 * 64 * 64
    assert largest == {8: weight, 64: weight}
    model = tiled(wide, only=()).requires_grad_(False)
    x = normal(1, 640, 64).requires_grad_()
    with LargestResult() as found:
        model.model.layers[0].mlp(x).sum().backward()
    assert found.elements == x.numel()


def calls(model: nn.Module, kind: str) -> Counter[str]:
    """How often the module of this name in each layer is called."""
    counted: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith(kind):
            module.register_forward_pre_hook(lambda module, args, name=name: counted.update([name]))
    return counted


@pytest.mark.parametrize("kept", [checkpointing.Keeps.NOTHING, checkpointing.Keeps.INPUT, checkpointing.Keeps.MATMULS])
def test_a_recomputed_layer_computes_its_mlp_only_in_tiles_of_the_backward_pass(kept: checkpointing.Keeps) -> None:
    model = make().train()
    ours = tiled(model, only=())
    checkpoint_layers(ours)
    for layer in checkpointing.layers(ours):
        checkpointing.keep(layer, kept)
    # The first pass finds out which matmul is the last.
    step(ours, **tokens())
    counted = calls(ours, "down_proj")
    assert_same_step(ours, model, rtol=1.3e-6, atol=1e-5)
    assert set(counted.values()) == {2 * TILES}


def test_each_weight_gets_its_gradient_once_and_a_hook_on_it_the_whole_gradient() -> None:
    model, calls, arrived = tiled(make().train()), Counter[str](), Counter[str]()
    expected = step(model, **tokens())

    def doubled(name: str, gradient: torch.Tensor) -> torch.Tensor:
        calls.update([name])
        return gradient * 2

    names = [name for name, _ in model.named_parameters() if ".mlp." in name]
    for name in names:
        weight = model.get_parameter(name)
        weight.register_hook(partial(doubled, name))
        weight.register_post_accumulate_grad_hook(lambda weight, name=name: arrived.update([name]))
    found = step(model, **tokens())
    assert dict(calls) == dict(arrived) == dict.fromkeys(names, 1)
    assert len(names) == 3 * LAYERS
    for name in names:
        torch.testing.assert_close(found[name], 2 * expected[name])


def test_a_second_derivative_is_refused() -> None:
    mlp = tiled(make().train()).model.layers[0].mlp
    x = normal(1, 22, next(mlp.parameters()).shape[1]).requires_grad_()
    (gradient,) = torch.autograd.grad(mlp(x).sum(), x)
    assert gradient is not None
    with pytest.raises(GradientError, match="a tiled MLP: the gradient must not be differentiated again"):
        torch.autograd.grad(mlp(x).sum(), x, create_graph=True)


def test_the_backward_pass_draws_the_same_dropout() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Odd(nn.Dropout(0.5), same, by_child)]).to(tiny_models.DEVICE, torch.float64).train()
    liger_hf.apply(model, only=(), mlp_rows=4)
    x, direction = torch.randn(2, 1, 30, 24, dtype=torch.float64).to(tiny_models.DEVICE)

    def loss(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        value: torch.Tensor = model[0](x).square().sum()
        # Draws in between, as the rest of a model does.
        normal(3)
        return value

    x.requires_grad_()
    loss(x).backward()
    after = normal(1)
    torch.manual_seed(1)
    model[0](x)
    normal(3)
    assert torch.equal(normal(1), after), "the backward pass moved the generator"
    with torch.no_grad():
        slope = (loss(x + 1e-6 * direction) - loss(x - 1e-6 * direction)) / 2e-6
    torch.testing.assert_close((x.grad * direction).sum(), slope, rtol=1e-6, atol=0)


def test_a_short_call_after_a_long_one_under_autocast_has_gradients() -> None:
    model = tiled(make().train(), only=())
    mlp = model.model.layers[0].mlp
    with torch.autocast(tiny_models.DEVICE.type, torch.bfloat16):
        mlp(normal(1, 22, 64).requires_grad_())
        mlp(normal(1, 4, 64)).sum().backward()
    assert all(weight.grad is not None for weight in mlp.parameters())


def test_frozen_weights_get_no_gradient_and_adapters_do() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make(), config).train()
    for options in ({}, {"only": ()}):
        assert_same_step(tiled(model, **options), model, atol=1e-5)


def test_without_gradients_there_are_tiles_too() -> None:
    model = make().eval()
    ours = tiled(model, only=())
    counted = calls(ours, "up_proj")
    with torch.no_grad():
        torch.testing.assert_close(ours(**tokens()).logits, model(**tokens()).logits)
    assert set(counted.values()) == {TILES}


def test_undo_restores_the_mlp_and_a_copy_is_independent() -> None:
    model = tiled(make().train())
    other = copy.deepcopy(model)
    model.liger_report.undo()
    assert "forward" not in model.model.layers[0].mlp.__dict__
    counted = calls(model, "up_proj"), calls(other, "up_proj")
    step(model, **tokens())
    step(other, **tokens())
    assert [set(each.values()) for each in counted] == [{1}, {2 * TILES}]


def test_a_weight_that_was_updated_since_the_forward_pass_is_an_error() -> None:
    model = tiled(make().train(), only=())
    loss = model(**tokens()).loss
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_module_whose_rows_depend_on_each_other_is_left_whole() -> None:
    mixing = Unit(lambda unit, gate, up: unit.dropout(gate.softmax(dim=-2) * up))
    other = Unit(lambda unit, gate, up: unit.dropout(gate * up))
    for unit, count in ((mixing, 0), (other, 1)):
        report = liger_hf.apply(nn.ModuleList([unit]).to(tiny_models.DEVICE).eval(), only=(), mlp_rows=4)
        assert report.notes[-1].startswith(f"{count} gated MLPs")
    x = normal(1, 12, 24)
    assert torch.equal(mixing(x), Unit.forward(mixing, x))


@pytest.mark.parametrize("rows", [0, "16k"])
def test_the_rows_must_be_at_least_one(rows: Any) -> None:
    with pytest.raises(OptionError, match=f"mlp_rows must be an integer of at least 1, got {rows!r}"):
        liger_hf.apply(make(), mlp_rows=rows)


def trains(rank: int, ways: tuple[str, ...]) -> None:
    with one_of_ranks(rank):
        for way in ways:
            _trains(rank, way)


def _trains(rank: int, way: str) -> None:
    def module_of(weights: Any, run: _TiledCall) -> int:
        # What a tile multiplies by is whole, and there for all tiles.
        assert all(type(weight) is nn.Parameter and weight.numel() == 96 * 64 for weight in weights)
        return id(run.module)

    model = make().train()
    checkpoint_layers(model)
    ours = tiled(model)
    with pytest.MonkeyPatch.context() as patch:
        gathered = recorded(patch, _TiledCall, "weights", after=module_of)
        parallel = WAYS[way](ours)
        parallel(**batch(rank)).loss.backward()
    # Once in the forward pass, once when the layer is recomputed, once in the backward pass.
    assert [*Counter(gathered).values()] == [3] * LAYERS
    Expected.of(model).compare(way, ours)


@pytest.mark.cpu
def test_two_ranks_train_tiles_to_the_mean_of_their_gradients() -> None:
    on_two_ranks(trains, ("ddp", "ddp_static", "fsdp2"))
