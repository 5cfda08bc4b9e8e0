# SPDX-License-Identifier: Apache-2.0
"""`--adapter-rank`, `--adapter-alpha` and `--adapter-targets`."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback

from liger_hf.four_bits import in_four_bits
from liger_hf.quantizer import loading_in_four_bits
from liger_train import compiling, techniques
from liger_train.configs import config_of
from liger_train.model import build, unquantized
from liger_train.plan.ledger import Ledger
from liger_train.plan.step import predict
from liger_train.runs.run import run
from liger_train.setup import Setup
from train.training import refused

pytest.importorskip("peft")

pytestmark = pytest.mark.slow


def test_adapters_have_the_rank_the_scale_and_the_places_that_were_asked_for_and_learn(small: Setup) -> None:
    adapters = {"adapter": "lora", "adapter_rank": 4, "adapter_alpha": 6, "adapter_targets": "q_proj, v_proj"}
    setup = replace(small, **adapters, learning_rate=3e-2)
    built = build(setup, torch.device("cpu"))
    layers = {
        name: one for name, one in built.model.named_modules() if hasattr(one, "lora_A") and hasattr(one, "scaling")
    }
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"}
    assert len(layers) == 4
    assert {(one.r["default"], one.scaling["default"]) for one in layers.values()} == {(4, 1.5)}
    assert built.notes[0] == (
        "Training adapters of rank 4 on 4 linear layers (q_proj, v_proj), in float32 (896); the frozen weights are in "
        "float32 (31,392). "
        "83 % of the layers' weights have none: gate_proj, up_proj, down_proj, o_proj and 1 more."
    )
    row = run(setup)
    assert not row.failed, row.reason
    assert row.losses[-1] < row.losses[0] - 0.05
    # Two layers with rank 4: 32 to 32 and 32 to 16.
    assert row.trainable_parameters == 2 * 4 * (32 + 32 + 32 + 16) == 896
    assert (row.adapter_rank, row.adapter_targets) == (4, "q_proj, v_proj")
    assert not any("no gradient" in note for note in row.notes)


EXPERTS = {
    "gpt_oss": ("8 linear layers (q_proj, k_proj, v_proj, o_proj) and 4 weights (down_proj, gate_up_proj)", "3 % of the layers' weights have none: gate_up_proj_bias, router, down_proj_bias."),
    "qwen2_moe": ("14 linear layers (q_proj, k_proj, v_proj, o_proj and 3 more) and 4 weights (down_proj, gate_up_proj)", "2 % of the layers' weights have none: gate, shared_expert_gate."),
}  # fmt: skip


@pytest.fixture
def experts(small: Setup, request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    """A model with experts that peft would adapt by itself, or would not."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    counts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    counts |= {"shared_expert_intermediate_size": 24}
    AutoConfig.for_model(request.param, vocab_size=400, **sizes, **counts, pad_token_id=None).save_pretrained(tmp_path)
    return replace(small, model=str(tmp_path), random_weights=True, adapter="lora", steps=1)


@pytest.mark.parametrize(
    ("experts", "places", "left"), [(kind, *words) for kind, words in EXPERTS.items()], indirect=["experts"]
)
def test_experts_in_four_bits_are_trained_planned_and_saved_for_peft(
    experts: Setup, places: str, left: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    setup = replace(experts, adapter="qlora", precision="bf16")
    built = build(setup, torch.device("cpu"))
    experts_of = [module for module in built.model.modules() if in_four_bits(module)]
    linear = [p.quant_state for p in built.model.parameters() if hasattr(p, "quant_state")]
    matrices = [getattr(module, name) for module in experts_of for name in in_four_bits(module)]
    packed = sum(math.prod(state.shape) for state in linear) + sum(matrix.numel() for matrix in matrices)
    # Shared experts are linear layers; neither their gate nor the router is quantized.
    assert (len(linear), len(matrices)) == (14 if "shared_expert" in str(built.model) else 8, 4)
    for words in (f"rank 16 on {places}, in", f"the frozen weights are in 4 bits ({packed:,}) and bfloat16 (", left):
        assert words in built.notes[0]
    built.model.save_pretrained(tmp_path / "adapter")
    plain = build(replace(setup, adapter="none"), torch.device("cpu")).model
    loaded = pytest.importorskip("peft").PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert {name for name, _ in loaded.named_parameters() if "lora_" in name} == {
        name for name, _ in built.model.named_parameters() if "lora_" in name
    }
    row, planned = run(setup), predict(setup)
    assert planned.notes[0] == built.notes[0]
    assert not row.failed, row.reason
    assert planned.trainable_parameters == row.trainable_parameters
    trained = f"in float32 ({row.trainable_parameters:,}); the frozen weights are in 4 bits ({packed:,}) and"
    assert trained in row.notes[-2]
    assert (planned.parameters, packed) == (row.parameters, row.parameters_in_4_bits)
    assert row.parameters_in_16_bits == row.parameters - row.trainable_parameters - packed > 0


@pytest.mark.parametrize("experts", EXPERTS, indirect=True)
def test_experts_that_are_named_are_trained_and_planned(experts: Setup) -> None:
    setup = replace(experts, adapter_targets="experts.gate_up_proj,experts.down_proj", precision="bf16")
    techniques.check(setup)
    row, planned = run(setup), predict(setup)
    assert not row.failed, row.reason
    assert any("on 4 weights (down_proj, gate_up_proj)" in note for note in row.notes)
    assert planned.trainable_parameters == row.trainable_parameters
    assert (row.parameters_in_4_bits, row.parameters_in_16_bits) == (0, row.parameters - row.trainable_parameters)
    of_plan, of_run = ([n for n in notes if "adapters of rank" in n] for notes in (planned.notes, row.notes))
    assert of_plan == of_run


@pytest.mark.parametrize("experts", ["gpt_oss"], indirect=True)
def test_targets_that_a_model_with_experts_lacks_name_its_experts(experts: Setup) -> None:
    with refused("and the experts' down_proj, gate_up_proj, got 'gate_proj'"):
        techniques.check(replace(experts, adapter_targets="gate_proj"))


def test_an_adapter_as_a_model_says_what_to_do(small: Setup, model: Path, tmp_path: Path) -> None:
    build(replace(small, adapter="lora"), torch.device("cpu")).model.save_pretrained(tmp_path)
    for _ in range(2):
        with refused(r"--model must be a whole model, got .*, an adapter of peft; .*merge_and_unload"):
            config_of(replace(small, model=str(tmp_path)))
        # The config of a model may be beside it.
        shutil.copy(model / "config.json", tmp_path)


@pytest.mark.parametrize("experts", ["qwen3_moe"], indirect=True)
def test_experts_in_four_bits_have_the_same_losses_in_compiled_layers(
    experts: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(compiling, "COMPILER", "aot_eager")
    setup = replace(experts, adapter="qlora", steps=3, learning_rate=1e-2)
    eager, compiled = (run(replace(setup, compile=kind)) for kind in ("none", "default"))
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-6)
    assert not any("eager mode" in note for note in compiled.notes), compiled.notes


# The values of four bits, the first half of them the positive ones.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Store the experts of the gpt-oss in a folder in MXFP4, and return the matrices that they stand for."""
    config, expected = AutoConfig.from_pretrained(folder), {}
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        codes = torch.randint(16, (experts, outer, inner))
        scales = torch.randint(118, 123, (experts, outer, inner // 32))
        weights[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).unflatten(-1, (-1, 16))
        weights[f"{name}_scales"] = scales.to(torch.uint8)
        signed = torch.cat([FP4, -FP4])[codes]
        expected[name] = (signed * 2.0 ** (scales - 127).repeat_interleave(32, -1)).mT
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(stored))
    return expected


@pytest.mark.parametrize("experts", ["gpt_oss"], indirect=True)
@pytest.mark.parametrize("adapter", ["none", "lora", "qlora"])
def test_experts_in_mxfp4_are_dequantized(experts: Setup, adapter: str) -> None:
    expected = in_mxfp4(Path(experts.model))
    built = build(replace(experts, adapter=adapter, random_weights=False, sequence=8), torch.device("cpu"))
    to = "NF4" if adapter == "qlora" else "float32"
    note = f"The experts of {experts.model} are in MXFP4; each is dequantized when it is loaded, to {to}."
    assert built.notes[0] == note
    assert not any("leaves out" in note or "lacks" in note for note in built.notes)
    model = built.model if adapter == "none" else built.model.get_base_model()
    for name, matrices in expected.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        module = module.get_base_layer() if adapter != "none" else module
        if adapter == "qlora":
            assert in_four_bits(module) == ["gate_up_proj", "down_proj"]
            bitsandbytes = pytest.importorskip("bitsandbytes")
            weight = bitsandbytes.nn.Params4bit(matrices, quant_type="nf4").to("cpu")
            matrices = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(getattr(module, last), matrices.to(getattr(module, last).dtype)), name


class Allocated(Ledger):
    """Tracks the storages of tensors that have memory."""

    def record(self, tensor: torch.Tensor, label: str | None = None) -> int:
        return 0 if tensor.is_meta else super().record(tensor, label)


@pytest.mark.parametrize(
    ("experts", "most"), [("gpt_oss", 0.75), ("qwen3_moe", 1.2)], indirect=["experts"], ids=["mxfp4", "sixteen_bits"]
)
def test_loading_experts_in_four_bits_takes_little_more_memory_than_the_model(experts: Setup, most: float) -> None:
    pytest.importorskip("bitsandbytes")
    folder, sizes = Path(experts.model), {"num_experts": 32, "num_local_experts": 32, "moe_intermediate_size": 64}
    config = AutoConfig.from_pretrained(folder, hidden_size=64, dtype="bfloat16", **sizes)
    config.save_pretrained(folder)
    if config.model_type == "gpt_oss":
        in_mxfp4(folder)
    else:
        # One tensor for each expert.
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    with loading_in_four_bits(), Allocated() as memory:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, quantization_config=four_bits)
    assert len([module for module in model.modules() if in_four_bits(module)]) == 2
    largest = 2 * 32 * 128 * 64
    assert memory.peak().total - memory.end().total < most * largest


@pytest.mark.parametrize("experts", EXPERTS, indirect=True)
def test_random_weights_are_quantized_before_the_next_ones_are_made(experts: Setup) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"num_experts": 32, "num_local_experts": 32, "hidden_size": 64, "moe_intermediate_size": 64}
    config = AutoConfig.from_pretrained(experts.model, **sizes)
    config.save_pretrained(experts.model)
    setup = replace(experts, adapter="qlora", adapter_targets="q_proj", precision="bf16", liger="none")
    with Allocated() as memory:
        built = build(setup, torch.device("cpu"))
    experts_of = [module for module in built.model.modules() if in_four_bits(module)]
    sizes_of = [sum(getattr(module, name).numel() for name in in_four_bits(module)) for module in experts_of]
    assert len(experts_of) == 2
    # Both matrices of one layer's experts are made at once, in 16 bits.
    assert memory.peak().total - memory.end().total < 1.25 * 2 * max(sizes_of)


@pytest.mark.parametrize("experts", EXPERTS, indirect=True)
def test_random_weights_in_four_bits_are_those_of_the_unquantized_model(experts: Setup) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    setup, cpu = replace(experts, adapter="qlora", precision="bf16", random_weights=True), torch.device("cpu")
    plain = unquantized(replace(setup, adapter="lora"), cpu)
    model = build(replace(setup, liger="none"), cpu).model.get_base_model()
    found = 0
    for name, weight in plain.named_parameters():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        while hasattr(module, "base_layer"):
            module = module.base_layer
        ours = getattr(module, last)
        linear = hasattr(ours, "quant_state")
        ours = functional.dequantize_4bit(ours.data, ours.quant_state) if linear else ours
        if linear or last in in_four_bits(module):
            # Compare with bitsandbytes' own rounding: with AVX-512, it wrongly scales blocks that end within a row.
            four_bits = functional.quantize_4bit(weight.data, quant_type="nf4", compress_statistics=True)
            weight, found = functional.dequantize_4bit(*four_bits), found + 1
        torch.testing.assert_close(ours, weight.data, rtol=0, atol=0, check_dtype=False, msg=f"{name}: {{}}".format)
    assert found >= 12


class LastLayerSkipped(TrainerCallback):
    """Makes the MLP of the last layer return its input."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        model.base_model.model.model.layers[-1].mlp.forward = lambda hidden: hidden


def test_a_run_says_which_adapters_got_no_gradient(small: Setup) -> None:
    notes = run(replace(small, adapter="lora", steps=3), observers=[LastLayerSkipped()]).notes
    assert [note for note in notes if "no gradient" in note] == [
        "6 of 12 adapter weights of model.layers.*.mlp got no gradient: their module never ran."
    ]
