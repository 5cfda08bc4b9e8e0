# SPDX-License-Identifier: Apache-2.0
"""Linear layers that read one input are one matmul, and a tied embedding adds its gradient to rows: with the same
results, names and files."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import liger_hf
from hf import tiny_models
from hf.tiny_models import LAYERS, disagreements, exact_step, make, step, tokens, twin
from liger_hf.rules.lora.source import sharing
from liger_train import merging, tied
from liger_train import model as building
from liger_train.checkpointing import Keeps, SelectiveCheckpointing, checkpoint_layers, keep, layers
from liger_train.model import build
from liger_train.runs.run import run
from liger_train.setup import Setup

pytestmark = pytest.mark.slow


def prepared(architecture: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = make(architecture, dtype, **options).train()
    liger_hf.apply(model)
    return model


def counted(model: nn.Module) -> int:
    """How many matmuls of linear layers a forward pass takes."""
    found = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(function)
            return function(*args, **(kwargs or {}))

    with Watch(), torch.no_grad():
        model.model(input_ids=tokens()["input_ids"])
    return found.count(nn.functional.linear)


@pytest.mark.parametrize(
    ("architecture", "sentence"),
    [
        ("llama", f"{LAYERS} modules."), ("qwen3", f"{LAYERS} modules."), ("gemma2", f"{LAYERS} modules."),
        ("qwen2", f"0 modules; left {LAYERS}: they have a bias."), ("phi3", "0 modules."),
    ],
)  # fmt: skip
def test_merged_layers_are_as_accurate_as_separate_ones(architecture: str, sentence: str) -> None:
    model = prepared(architecture, torch.bfloat16 if architecture == "llama" else torch.float32)
    plain, exact = step(model, **tokens()), exact_step(model, **tokens())
    assert merging.merge(model) == f"One matmul for the linear layers that read the same input, in {sentence}"
    assert not disagreements(step(model, **tokens()), plain, exact)


def test_each_group_is_one_matmul() -> None:
    model = prepared()
    assert counted(model) == 7 * LAYERS
    merging.merge(model)
    assert counted(model) == 4 * LAYERS


def test_a_saved_model_has_every_weight_under_its_name(tmp_path: Path) -> None:
    model = prepared()
    names, before = list(model.state_dict()), {name: value.clone() for name, value in model.state_dict().items()}
    merging.merge(model)
    assert list(model.state_dict()) == names
    layer = model.model.layers[0].self_attn
    # Libraries take weights in one storage for tied ones.
    assert layer.q_proj.weight.untyped_storage().data_ptr() != layer.k_proj.weight.untyped_storage().data_ptr()
    assert layer.q_proj.weight.untyped_storage().nbytes() == layer.q_proj.weight.nbytes
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in before.items())


@pytest.mark.parametrize("how", ["data", "parameter", "state_dict", "copy"])
def test_weights_that_are_replaced_are_the_ones_that_count(how: str) -> None:
    model = prepared()
    other = twin(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.25)
    expected = step(other, **tokens())
    merging.merge(model)
    if how == "copy":
        model = copy.deepcopy(model)
    if how in ("state_dict", "copy"):
        model.load_state_dict(other.state_dict(), assign=how == "state_dict")
    else:
        for name, weight in other.named_parameters():
            if how == "data":
                model.get_parameter(name).data = weight.data.clone()
            else:
                module, _, own = name.rpartition(".")
                setattr(model.get_submodule(module), own, nn.Parameter(weight.detach().clone()))
        model.tie_weights()
    torch.testing.assert_close(step(model, **tokens()), expected, rtol=1e-4, atol=1e-5)


def test_what_is_adapted_hooked_or_partly_frozen_is_left_alone() -> None:
    model = prepared()
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda module, args, output: output * 2)
    model.model.layers[1].self_attn.v_proj.weight.requires_grad_(False)
    expected = step(model, **tokens())
    sentence = merging.merge(model)
    assert "; left 1: they have hooks or a forward of their own; left 1: their weights differ" in sentence
    torch.testing.assert_close(step(model, **tokens()), expected, rtol=1e-4, atol=1e-5)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make(), peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"]))
    liger_hf.apply(adapted)
    assert "in 0 modules" in merging.merge(adapted)


def test_layers_run_by_themselves_under_autocast() -> None:
    model = prepared()
    merging.merge(model)
    with torch.autocast(tiny_models.DEVICE.type, torch.bfloat16):
        assert counted(model) == 7 * LAYERS
        model(**tokens()).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(
    ("keeps", "times"), [(Keeps.ALL, 2), (Keeps.MATMULS, 2), (Keeps.INPUT, 3)], ids=["all", "matmuls", "input"]
)
def test_layers_that_keep_matmuls_keep_those_that_are_merged(
    keeps: Keeps, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is computed forward, for the gradient of its input, and where it is not kept once more."""
    model = prepared()
    expected = step(model, **tokens())
    merging.merge(model)
    checkpoint_layers(model)
    shared = SelectiveCheckpointing()
    for layer in layers(model):
        keep(layer, keeps, shared)
    step(model, **tokens())
    read: list[int] = []
    whole = merging._whole
    monkeypatch.setattr(merging, "_whole", lambda *tensors: read.append(1) or whole(*tensors))
    found = step(model, **tokens())
    assert len(read) == times * LAYERS
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Shapes(nn.Module):
    """Forwards that call three layers with one argument."""

    def reads_the_shape(self, x: Tensor) -> Any:
        rows = x.shape[0]
        return self.a(x).view(rows, -1), self.b(x), self.c(x)

    def changes_it(self, x: Tensor) -> Any:
        y = self.a(x)
        x.add_(1)
        return y, self.b(x)

    def takes_another(self, x: Tensor) -> Any:
        y = self.a(x)
        x = y
        return self.b(x)

    def calls_one_twice(self, x: Tensor) -> Any:
        return self.a(x), self.a(x), self.b(x)

    def calls_some(self, x: Tensor) -> Any:
        return self.a(x), self.b(x), self.c(x) if self.has_c else None

    def has_two(self, x: Tensor, z: Tensor) -> Any:
        return self.a(x), self.b(z), self.c(z)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reads_the_shape", {"x": ["a", "b", "c"]}), ("changes_it", {}), ("takes_another", {}), ("calls_one_twice", {}),
        ("calls_some", {}), ("has_two", {"z": ["b", "c"]}),
    ],
)  # fmt: skip
def test_only_layers_that_surely_read_one_input_share_it(name: str, expected: dict[str, list[str]]) -> None:
    assert {argument: sorted(called) for argument, called in sharing(getattr(Shapes, name)).items()} == expected


# -- the tied embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_tied_embedding_is_as_accurate_as_before(dtype: torch.dtype) -> None:
    model = prepared(dtype=dtype, tie_word_embeddings=True)
    plain, exact = step(model, **tokens()), exact_step(model, **tokens())
    assert tied.tie(model) == "The gradient of the tied embedding is added to the rows of its tokens alone."
    assert not disagreements(step(model, **tokens()), plain, exact)


def test_the_head_has_written_its_gradient_when_the_rows_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a second dense gradient would be made and added."""
    model = prepared(tie_word_embeddings=True)
    tied.tie(model)
    made: list[int] = []
    zeros = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda *args, **more: made.append(args[0].numel()) or zeros(*args, **more))
    model.zero_grad()
    model(**tokens()).loss.backward()
    assert model.get_input_embeddings().weight.numel() not in made


def test_rows_are_summed_in_float32_and_padding_has_none() -> None:
    index = torch.tensor([3, 1, 3, 3, 0, 2, 3])
    rows = torch.tensor([256.0, 1, 1, 1, 5, 9, 1], dtype=torch.bfloat16)[:, None].expand(7, 2).contiguous()
    total = torch.ones(5, 2, dtype=torch.bfloat16)
    tied.add_rows(total, index, rows, padding=2)
    # One by one, in bfloat16, 256 + 1 is 256.
    assert total[:, 0].tolist() == [6.0, 2.0, 1.0, 260.0, 1.0]
    tied.add_rows(total, index[:0], rows[:0], padding=None)
    assert total[0, 0] == 6


@pytest.mark.parametrize("how", ["untied", "frozen", "hooked", "sparse"])
def test_other_embeddings_are_left_alone(how: str) -> None:
    model = prepared(tie_word_embeddings=how != "untied")
    embedding = model.get_input_embeddings()
    if how == "frozen":
        embedding.weight.requires_grad_(False)
    if how == "hooked":
        embedding.weight.register_hook(lambda grad: grad * 2)
    embedding.sparse = how == "sparse"
    assert tied.tie(model) == ""
    assert "forward" not in vars(embedding)


@pytest.mark.parametrize(
    ("options", "tied", "merged"),
    [({}, True, True), ({"precision": "bf16"}, True, False), ({"compile": "default"}, False, False)],
)
def test_a_run_with_graphs_merges_and_ties(small: Setup, options: dict[str, Any], tied: bool, merged: bool) -> None:
    notes = build(replace(small, **({"compile": "graphs"} | options)), torch.device("cpu")).notes
    assert any(note.startswith("The gradient of the tied embedding") for note in notes) == tied
    assert any(note.startswith("One matmul for the linear layers") for note in notes) == merged


def test_a_run_with_both_has_the_losses_of_one_without(small: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(small, accumulation=2, checkpoint="full")
    expected = run(setup)
    patched = building._patched

    def both(model: nn.Module, setup: Setup, notes: list[str]) -> str:
        replaced = patched(model, setup, notes)
        notes += [tied.tie(model), merging.merge(model)]
        return replaced

    monkeypatch.setattr(building, "_patched", both)
    found = run(setup)
    assert any("in 2 modules" in note for note in found.notes)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
