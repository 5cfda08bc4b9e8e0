# SPDX-License-Identifier: Apache-2.0
"""--precision fp8 trains as bf16 does, within the noise of 8 bits, and says which layers it leaves alone."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from liger_core.errors import LigerError, OptionError
from liger_train import float8, techniques
from liger_train.float8 import RECIPES
from liger_train.model import build
from liger_train.plan.float8 import Float8
from liger_train.plan.ledger import rounded
from liger_train.plan.sharding import sharding_of
from liger_train.plan.step import _step, fake_model, ledger_of_a_step, predict
from liger_train.setup import Setup
from train.training import Trained, multiplies_by_rows, saved_model, setup_of, trained

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
STEPS = 15
# Float8 has 3 bits of mantissa after the first, so a matmul is off by a few percent, and the mean of a loss over tokens
# by less.
NOISE = 0.02


def can_run(recipe: str) -> None:
    """Skip a test that this PyTorch cannot run on the CPU."""
    if "rowwise" in recipe and not multiplies_by_rows():
        pytest.skip("this PyTorch multiplies on the CPU with one scale per tensor alone")


def on_the_cpu(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """PyTorch multiplies in float8 on the CPU, too, where no user would: slowly, and with the same roundings."""
    monkeypatch.setattr(techniques, "check", lambda setup: None)
    return trained(setup)


@pytest.mark.parametrize("precision", ["fp8-pure", "fp8-rowwise-pure"])
def test_losses_are_close_to_those_of_bfloat16(precision: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    can_run(precision)
    setup = {"steps": STEPS, "checkpoint": "full", "liger": "all"}
    expected = trained(setup_of(folder, precision="bf16-pure", **setup)).losses
    found = on_the_cpu(setup_of(folder, precision=precision, **setup), monkeypatch)
    assert expected[-1] < 0.7 * expected[0], "it does not learn"
    assert found.losses != expected, "nothing is in float8"
    assert found.losses == pytest.approx(expected, abs=NOISE * expected[0])
    assert {p.dtype for p in found.built.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("precision", RECIPES)
@pytest.mark.parametrize("checkpoint", ["none", "full", "auto"])
def test_a_gpu_trains_to_the_losses_of_bfloat16(
    precision: str, checkpoint: str, folder: Path, device: torch.device
) -> None:
    if device.type == "cpu" or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that multiplies in float8")
    pytest.importorskip("torchao")
    setup = {"steps": STEPS, "device": "cuda", "liger": "all", "checkpoint": checkpoint}
    plain = "bf16-pure" if precision.endswith("-pure") else "bf16"
    expected = trained(setup_of(folder, precision=plain, **setup)).losses
    found = trained(setup_of(folder, precision=precision, **setup)).losses
    assert found != expected, "nothing is in float8"
    assert found == pytest.approx(expected, abs=NOISE * expected[0])


def test_mixed_precision_keeps_weights_in_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    found = on_the_cpu(setup_of(folder, precision="fp8"), monkeypatch)
    assert {p.dtype for p in found.built.model.parameters()} == {torch.float32}
    assert found.trainer.accelerator.mixed_precision == "bf16"
    assert found.losses[-1] < found.losses[0]


def test_every_layer_but_the_head_and_odd_ones_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    # Keys and values of 8 columns.
    narrow = saved_model(tmp_path, num_attention_heads=8, num_key_value_heads=1)
    built = build(setup_of(narrow, precision="fp8-pure", liger="all"), CPU)
    layers = {name: layer for name, layer in built.model.named_modules() if isinstance(layer, nn.Linear)}
    kinds = {name.rpartition(".")[2]: type(layer).__name__ for name, layer in layers.items()}
    assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == {
        "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert {name for name, kind in kinds.items() if kind == "Linear"} == {"k_proj", "v_proj", "lm_head"}
    assert built.notes[0] == (
        "--precision fp8-pure: 10 linear layers multiply in float8 with one scale per tensor; left out: "
        "4 × dimensions that are not multiples of 16, 1 × the LM head, whose matmul is part of the loss."
    )
    assert "swiglu 2" in built.replaced


def test_a_saved_model_has_plain_linear_layers(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    model = build(setup_of(folder, precision="fp8-pure"), CPU).model
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {type(layer) for layer in again.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shard": "zero2"}, "supports data parallelism and --shard fsdp2, got --shard zero2; use --shard fsdp2"),
        ({"tp": 2, "ranks": 2}, "supports data parallelism and --shard fsdp2, got --tp 2 --cp 1"),
        ({"adapter": "lora"}, "trains every weight, got --adapter lora"),
        ({"sequence": 1000}, "needs a --sequence that is a multiple of 16, as float8 matmuls need, got 1000"),
        ({}, "needs a GPU with compute capability 8.9 or higher, such as Ada, Hopper or Blackwell, got A100 with 8.0; use --precision bf16"),
    ],
    ids=["sharded by DeepSpeed", "tensor parallel", "adapters", "odd sequences", "old GPU"],
)  # fmt: skip
def test_what_float8_cannot_do_is_refused_before_anything_is_loaded(
    options: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    with pytest.raises(LigerError, match=r"^train: --precision fp8 ") as raised:
        techniques.check(Setup("tiny", precision="fp8", **options))
    assert sentence in str(raised.value)


@pytest.mark.parametrize("options", [{}, {"ranks": 2}, {"ranks": 2, "shard": "fsdp2"}], ids=["one", "two", "sharded"])
def test_a_gpu_that_has_float8_is_taken(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    techniques.check(Setup("tiny", precision="fp8", **options))


def test_a_model_without_a_layer_to_convert_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=128, n_embd=64, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(OptionError, match="got gpt2 with 8 × other classes of layers, 1 × the LM head"):
        float8.chosen_layers(model, Setup("gpt2", precision="fp8"), [])


def kept(layer: nn.Module, x: Tensor) -> dict[torch.dtype, int]:
    """The elements that a layer keeps for the backward pass beside its weight, by dtype; scales are left out."""
    found: dict[torch.dtype, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() > x.numel() // 8 and tensor.numel() != layer.weight.numel():
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.numel()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_plan_keeps_what_a_compiled_layer_keeps(recipe: str) -> None:
    torchao = pytest.importorskip("torchao.float8")
    can_run(recipe)
    linear = nn.Linear(64, 128, bias=False, dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    planned = kept(Float8(linear, recipe == "rowwise"), x)
    real = torchao.convert_to_float8_training(linear, config=torchao.Float8LinearConfig.from_recipe_name(recipe))
    real.compile(dynamic=False, backend="aot_eager_decomp_partition")
    assert planned == kept(real, x) == {torch.float8_e4m3fn: x.numel()}


def test_float8_is_planned_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    _step.cache_clear()
    small = {"batch": 8, "sequence": 512, "checkpoint": "none"}
    names = ("bf16", "bf16-pure", "fp8", "fp8-pure")
    peaks = {name: predict(Setup("tiny", precision=name, **small)).peak_bytes for name in names}
    # Without a copy of every weight in bfloat16.
    assert peaks["fp8"] < peaks["bf16"]
    assert peaks["fp8-pure"] < peaks["fp8"]
    assert peaks["fp8"] == pytest.approx(peaks["bf16"], rel=0.2)
    assert peaks["fp8-pure"] == pytest.approx(peaks["bf16-pure"], rel=0.2)
    notes = predict(Setup("tiny", precision="fp8-rowwise", **small)).notes
    assert "multiply in float8 with one scale per row" in notes[0]


def test_a_plan_of_fsdp2_holds_gathered_weights_in_float8() -> None:
    small = {"batch": 1, "sequence": 16, "ranks": 2, "shard": "fsdp2"}
    for precision, bytes_of_a_matrix, note in (
        ("fp8", 1, "with one scale per tensor, and FSDP2 gathers the weights of 14 in float8; left out"),
        ("fp8-rowwise-pure", 2, "with one scale per row; left out"),
    ):
        setup = Setup("tiny", precision=precision, **small)
        model, mode, notes = fake_model(setup)
        sizes = [(w.numel(), bytes_of_a_matrix if w.dim() == 2 else 2) for w in model.model.layers[0].parameters()]
        ledger = ledger_of_a_step(setup, model, sharding_of(setup, model), mode)
        gathered = sum(rounded(elements * itemsize) for elements, itemsize in sizes)
        # Two layers and the next ones of both, in both passes, and what the last gathering received.
        assert [size for _, size, _ in ledger.events].count(gathered) == 9
        assert note in notes[0]
