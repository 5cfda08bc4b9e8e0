# SPDX-License-Identifier: Apache-2.0
"""Every technique that runs on the CPU trains a model to the same losses with and without Liger, and rejects what it
cannot be combined with."""

import importlib.util
import io
import logging
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest
import torch
from torch.nn import functional

from liger_core.errors import DeviceError, LigerError, OptionError
from liger_hf.presets import PRESETS, preset
from liger_train import checkpointing, combinations, techniques, zero
from liger_train.configs import config_of
from liger_train.float8 import RECIPES
from liger_train.implementations import PEER
from liger_train.model import build
from liger_train.runs import process_group
from liger_train.runs.arguments import training_arguments
from liger_train.runs.context_parallel import context_parallel
from liger_train.setup import Setup
from liger_train.technique import Technique
from liger_train.techniques import LIST, NUMBER, TECHNIQUES
from train.training import Trained, setup_of, twice

PROJECT = Path(__file__).parents[2] / "packages" / "liger-train" / "pyproject.toml"
ALL = [technique for values in TECHNIQUES.values() for technique in values.values()]
VALUES = {NUMBER: "1", LIST: "rms_norm,rope"}
# What roundings may make of a loss. GaLore's singular vectors are decided by rounding where a gradient has fewer tokens
# than its rank.
ALLOWED = {"bf16": 2e-2, "fp16": 5e-3, "bf16-pure": 4e-2, "galore": 1e-3, "galore-layerwise": 1e-3, "galore-8bit": 5e-3}
# They compile for half a minute: tests/train/techniques_that_compile.py has the optimizers, test_float8.py the rest.
COMPILED = ("adamw-torchao-8bit", "adamw-torchao-4bit", *RECIPES)


def value_of(technique: Technique) -> str:
    return VALUES.get(technique.value, technique.value)


def alone(technique: Technique) -> bool:
    """Whether it runs in one process; shards, their copies and what they offload need two, in test_shards.py, as do
    parallel layers and sequences.

    test_compile.py has what is compiled.
    """
    elsewhere = ("shard", "replicate", "tp", "cp", "offload", "liger", "compile")
    return technique.option not in elsewhere and technique.value not in COMPILED


@pytest.mark.slow
@pytest.mark.parametrize("technique", [t for t in ALL if alone(t)], ids=lambda t: f"{t.option}-{value_of(t)}")
def test_a_technique_trains_with_liger_to_the_losses_without(
    technique: Technique, folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch has 32 tokens.
    monkeypatch.setattr("liger_train.model.MLP_ROWS", 12)
    if device.type not in technique.devices:
        pytest.skip(technique.reason)
    missing = [name for name in technique.packages if importlib.util.find_spec(name.replace("-", "_")) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    setup = setup_of(folder, device=device.type, **{technique.option: value_of(technique)})
    if technique.value == "auto":
        setup = replace(setup, steps=10)
    plain, liger = twice(setup)
    assert len(plain.losses) == setup.steps
    assert plain.losses[-1] < plain.losses[0], "it does not learn"
    exact = 1e-5 if device.type == "cpu" else 1e-4
    assert liger.losses == pytest.approx(plain.losses, rel=ALLOWED.get(technique.value, exact))
    assert liger.built.replaced.startswith("linear_cross_entropy 1")
    is_there(technique, liger)


def is_there(technique: Technique, trained: Trained) -> None:
    """The technique was carried by what its row names, and not left out on the way."""
    model, optimizer = trained.built.model, trained.trainer.optimizer.optimizer
    if technique.option == "optimizer" and technique.value != "galore-layerwise":
        package = type(optimizer).__module__.partition(".")[0].replace("_", "-")
        assert package == technique.implemented_by.split(",")[0].lower()
    if technique.value == "galore-layerwise":
        # Each gradient is dropped after its update.
        assert {p.grad for p in model.parameters()} == {None}
    if technique.option == "optimizer" and "8bit" in technique.value:
        states = [state for of in optimizer.state.values() for state in of.values() if torch.is_tensor(state)]
        assert torch.uint8 in {state.dtype for state in states}
    if technique.option == "adapter" and technique.value != "none":
        adapted = {("lora_" in name, p.dtype) for name, p in model.named_parameters() if p.requires_grad}
        assert adapted == {(True, torch.float32)}
    if technique.value == "qlora":
        assert any(type(p).__name__ == "Params4bit" for p in model.parameters())
    if technique.option == "precision":
        expected = torch.bfloat16 if technique.value == "bf16-pure" else torch.float32
        assert {p.dtype for p in model.parameters()} == {expected}
        expected = {"bf16": "bf16", "fp16": "fp16"}.get(technique.value, "no")
        assert trained.trainer.accelerator.mixed_precision == expected
    if technique.option == "mlp":
        assert ("2 gated MLPs compute at most 12 rows at once." in trained.built.notes) == (technique.value == "tiled")
    if technique.option == "checkpoint":
        assert checkpointing.checkpointed_layers(model) == {"full": 2, "offload": 2, NUMBER: 1}.get(technique.value, 0)
        assert len(trained.notes) == (technique.value == "auto")


def test_ranks_whose_gradients_are_on_the_host_can_sum_them_there() -> None:
    offloaded = Setup("tiny", shard="fsdp2", offload="parameters", ranks=2)
    assert process_group.join(offloaded) == {"ddp_backend": "cuda:nccl,cpu:gloo"}
    assert process_group.join(replace(offloaded, offload="none")) == {}


def test_low_rank_optimizers_project_the_linear_layers(folder: Path) -> None:
    for name, rank in (("galore", 128), ("apollo", 128), ("apollo-mini", 1)):
        arguments = training_arguments(setup_of(folder, optimizer=name), folder)
        assert f"rank={rank}," in str(arguments.optim_args)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("none", set()),
        ("all-but-loss", {"rms_norm", "add_rms_norm", "rope", "swiglu"}),
        ("rope,linear_cross_entropy", {"rope", "linear_cross_entropy"}),
    ],
)
def test_liger_applies_the_requested_ops(wanted: str, expected: set[str], folder: Path) -> None:
    built = build(setup_of(folder, liger=wanted), torch.device("cpu"))
    assert {part.split()[0] for part in built.replaced.split(", ") if part} == expected


def test_an_extra_installs_what_a_technique_needs() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    # The other library is compared with, and no part of a training run.
    for technique in (each for each in ALL if each.value != PEER):
        assert set(technique.packages) <= set(extras["all"])
        assert any(set(technique.packages) <= set(packages) for name, packages in extras.items() if name != "all")


@pytest.mark.parametrize("name", PRESETS)
def test_a_named_shape_is_a_model_of_its_size(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = preset(name, sequence=65_536)
    assert config.max_position_embeddings >= 65_536
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(config).num_parameters()
    billions = {
        "tiny": 0.002122, "small": 0.011094, "llama-3.2-1b": 1.24, "llama-3-8b": 8.03, "qwen2-7b": 7.62,
        "gemma-7b": 8.54, "mistral-7b": 7.24, "qwen3-4b": 4.02, "qwen3-30b-a3b": 30.53, "gemma-3-1b": 1.0,
        "phi-3-mini": 3.82,
    }  # fmt: skip
    assert count / 1e9 == pytest.approx(billions[name], rel=0.005)


MISUSES = [
    ({"optimizer": "adamw-8bits"}, "--optimizer must be one of adamw, adamw-8bit,", "Did you mean 'adamw-8bit'?"),
    ({"mlp": "tiled", "shard": "zero3"}, "--mlp tiled cannot be combined with --shard zero3, which would gather weights for each tile", "use --shard fsdp2"),
    ({"mlp": "tiled", "tp": 2, "ranks": 2}, "--mlp tiled cannot be combined with --tp 2, which would sum over the ranks for each tile", "use --mlp whole"),
    ({"checkpoint": "-1"}, "--checkpoint must be one of none, full, offload, auto or a number of layers, got '-1'", ""),
    ({"liger": "rms_nrm"}, "--liger must be one of none, all-but-loss, all, liger-kernel or ops separated by commas, got 'rms_nrm'", "Did you mean 'rms_norm'?"),
    ({"liger": "rope,swigl"}, "--liger rope,swigl must name ops among", "Did you mean 'swiglu'?"),
    ({"sequence": 1}, "--sequence must be from 2 to 16777216, got 1", ""),
    ({"offload": "optimizer"}, "--offload optimizer needs --shard zero1, zero2 or zero3, also on one GPU, got none", ""),
    ({"offload": "optimizer", "shard": "fsdp2"}, "--offload optimizer must be --offload parameters for --shard fsdp2", ""),
    ({"offload": "parameters", "shard": "zero2"}, "--offload parameters needs --shard zero3 or fsdp2, also on one GPU, got zero2", ""),
    ({"offload": "parameters", "shard": "fsdp2", "device": "cpu"}, "needs --device cuda for --shard fsdp2", "use --shard zero3"),
    ({"offload": "nvme", "shard": "zero3"}, "--offload nvme needs --nvme-folder", ""),
    ({"offload": "nvme", "shard": "zero3", "nvme_folder": "/not/there"}, "needs an existing folder", ""),
    ({"precision": "bf16-pure", "shard": "zero2"}, "--precision bf16-pure cannot be combined with --shard zero2", "use --precision bf16"),
    ({"optimizer": "galore", "shard": "zero1"}, "--optimizer galore cannot be combined with --shard zero1", "use --optimizer adamw"),
    ({"optimizer": "adamw-8bit", "shard": "zero2", "offload": "optimizer"}, "--optimizer adamw-8bit cannot be combined with --offload", ""),
    ({"optimizer": "adamw-torchao-8bit", "shard": "zero2"}, "--optimizer adamw-torchao-8bit cannot be combined with --shard zero2", ""),
    ({"optimizer": "galore-layerwise", "accumulation": 2}, "supports neither --accumulation 2", "use galore"),
    ({"tp": 2}, "the number of ranks must be a multiple of --tp × --cp × --replicate, got 2 × 1 × 1 and 1 rank", "give --ranks N"),
    ({"tp": 2, "ranks": 2, "shard": "zero3"}, "--tp 2 cannot be combined with --shard zero3", "use --shard fsdp2"),
    ({"tp": 2, "ranks": 4}, "--tp 2 needs --shard fsdp2", "over the 2 other ranks, got none"),
    ({"tp": 2, "ranks": 2, "shard": "fsdp2"}, "--tp 2 leaves no ranks for --shard fsdp2", "use --shard none"),
    ({"tp": 2, "ranks": 4, "shard": "fsdp2", "offload": "parameters"}, "--tp 2 cannot be combined with --offload parameters", ""),
    ({"tp": 2, "ranks": 2, "optimizer": "adafactor"}, "--tp 2 needs --optimizer adamw, got adafactor", ""),
    ({"tp": 4, "ranks": 4}, "--tp 4 must divide the 2 key heads of tiny", ""),
    ({"cp": 2, "ranks": 2}, "--cp 2 needs --shard fsdp2", ""),
    ({"cp": 2, "ranks": 2, "shard": "fsdp2", "sequence": 1026}, "--cp 2 needs a --sequence that is a multiple of 4", ""),
    ({"cp": 2, "ranks": 2, "shard": "fsdp2", "precision": "fp32"}, "--cp 2 needs --precision bf16", ""),
    ({"cp": 2, "replicate": 2, "ranks": 4, "shard": "fsdp2"}, "--replicate 2 leaves --cp 2 ranks for each copy, and accelerate", "use --replicate 1"),
    ({"adapter": "qlora", "shard": "zero3"}, "--adapter qlora cannot be combined with --shard zero3", "use --adapter lora"),
    ({"adapter": "qlora", "shard": "fsdp2", "ranks": 2}, "--adapter qlora cannot be combined with --shard fsdp2", "use --adapter lora"),
    ({"adapter": "lora", "shard": "fsdp2", "tp": 2, "ranks": 4}, "--tp 2 cannot be combined with --adapter lora", ""),
    ({"adapter_rank": 8}, "--adapter-rank needs --adapter lora or qlora, got none", ""),
    ({"adapter": "lora", "adapter_rank": 0}, "--adapter-rank must be from 1 to", ""),
    ({"adapter": "lora", "adapter_targets": " "}, "--adapter-targets must not be empty", ""),
    ({"adapter": "lora", "adapter_targets": "q_proj,v_prj"}, "down_proj, ", ", got 'v_prj'. Did you mean 'v_proj'?"),
    ({"adapter": "lora", "adapter_targets": "lm_head"}, "got 'lm_head'", ""),
    ({"compile": "default", "shard": "zero3"}, "--compile default cannot be combined with --shard zero3", ""),
    ({"compile": "default", "cp": 2, "ranks": 2, "shard": "fsdp2"}, "--compile default cannot be combined with --cp 2", ""),
    ({"compile": "graphs", "packing": True}, "--compile graphs cannot be combined with --packing", ""),
    ({"compile": "graphs", "ranks": 2}, "--compile graphs needs one GPU, or as many as --tp, got 2 ranks, ", "use --compile default"),
    ({"compile": "graphs", "shard": "fsdp2"}, "--compile graphs cannot be combined with --shard fsdp2", ""),
    ({"compile": "graphs", "checkpoint": "offload"}, "graphs cannot be combined with --checkpoint offload", ""),
    ({"compile": "graphs", "optimizer": "galore-layerwise"}, "cannot be combined with --optimizer galore-layer", ""),
    ({"compile": "default", "set": "torch_compile_mode=x"}, "--set cannot set torch_compile_mode; use --compile", ""),
    ({"validation": 1.0}, "--validation must be from 0 to below 1, got 1", ""),
    ({"set": "eval_steps=2"}, "--set eval_steps needs --validation", ""),
    ({"validation": 0.1, "set": "per_device_eval_batch_size=2"}, "per_device_eval_batch_size; --batch sets it", ""),
]  # fmt: skip


def test_newer_transformers_are_refused_that_shard_over_tensor_parallelism_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = Setup("tiny", tp=2, ranks=4, shard="fsdp2")
    monkeypatch.setattr(combinations, "_transformers_shards_both", lambda: False)
    techniques.check(both)
    monkeypatch.setattr(combinations, "_transformers_shards_both", lambda: True)
    with pytest.raises(LigerError, match="--tp 2 and --shard fsdp2 need Transformers before"):
        techniques.check(both)


@pytest.mark.parametrize(
    ("options", "sentence", "advice"), MISUSES, ids=lambda value: " ".join(map(str, value)) if value else "-"
)
def test_an_unsupported_setup_is_an_error_before_anything_is_loaded(
    options: dict[str, object], sentence: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(LigerError) as raised:
        techniques.check(Setup("tiny", **options))  # type: ignore[arg-type]
    assert str(raised.value).startswith("train: ")
    assert sentence in str(raised.value)
    assert advice in str(raised.value)


@pytest.mark.parametrize("technique", [t for t in ALL if t.packages], ids=lambda t: f"{t.option}-{t.value}")
def test_a_missing_package_is_named_with_what_installs_it(
    technique: Technique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    setup = Setup("tiny", **{technique.option: technique.value})
    with pytest.raises(OptionError, match=f"pip install {' '.join(technique.packages)}$"):
        techniques.check(setup)


def test_the_error_of_a_technique_for_gpus_has_the_reason() -> None:
    for technique in ALL:
        if technique.reason:
            with pytest.raises(DeviceError, match=technique.reason):
                techniques.check(Setup("tiny", device="cpu", **{technique.option: technique.value}))


def test_a_folder_without_a_model_raises_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liger_hf.hub.hub_is_reachable", lambda: False)
    with pytest.raises(OptionError, match="train: --model must be tiny, ") as raised:
        config_of(Setup(str(tmp_path)))
    assert not re.search("Did you mean|cannot be reached", str(raised.value))


def test_more_checkpointed_layers_than_there_are_is_an_error() -> None:
    with pytest.raises(OptionError, match="--checkpoint must be at most the number of layers, 2, got 3"):
        build(Setup("tiny", checkpoint="3"), torch.device("cpu"))


class TestTheSettingsOfDeepSpeed:
    """Its JSON, without DeepSpeed."""

    @pytest.fixture(autouse=True)
    def compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zero, "adam_problem", lambda: "")

    def of(self, **options: object) -> dict[str, object]:
        return dict(zero.config(Setup("llama-3.2-1b", **options)))  # type: ignore[arg-type]

    def test_parameters_go_with_the_optimizer_and_few_stay_on_the_device(self) -> None:
        found = self.of(shard="zero3", offload="parameters")["zero_optimization"]
        assert found["offload_optimizer"] == found["offload_param"] == {"device": "cpu", "pin_memory": True}  # type: ignore[index]
        assert found["stage3_max_live_parameters"] == found["stage3_max_reuse_distance"] == zero.LIVE  # type: ignore[index]

    def test_every_weight_goes_to_the_disk_through_a_buffer_for_the_largest_and_none_keeps_it(
        self, tmp_path: Path
    ) -> None:
        found = self.of(shard="zero3", offload="nvme", nvme_folder=str(tmp_path))["zero_optimization"]
        assert found["offload_param"]["buffer_size"] == 128_256 * 2048  # type: ignore[index]
        assert found["offload_optimizer"]["nvme_path"] == str(tmp_path)  # type: ignore[index]
        assert found["offload_param"]["max_in_cpu"] == 0  # type: ignore[index]
        assert found["stage3_max_reuse_distance"] == found["stage3_prefetch_bucket_size"] == 0  # type: ignore[index]

    def test_of_the_handlers_of_its_log_only_its_own_one_is_led_away_from_standard_output(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        logger = pytest.importorskip("deepspeed.utils").logger

        class Kept(logging.StreamHandler[TextIO]):
            pass

        own, kept = logging.StreamHandler(sys.stdout), Kept(io.StringIO())
        monkeypatch.setattr(logger, "handlers", [own, kept])
        zero.prepare(Setup("tiny", device="cpu", shard="zero3"))
        assert own.stream is sys.stderr
        assert isinstance(kept.stream, io.StringIO)

    def test_without_a_compiler_the_update_on_the_host_is_torchs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "zero_force_ds_cpu_optimizer" not in self.of(shard="zero2", offload="optimizer")
        monkeypatch.setattr(zero, "adam_problem", lambda: "no compiler")
        assert self.of(shard="zero2", offload="optimizer")["zero_force_ds_cpu_optimizer"] is False


def test_a_mask_of_one_ranks_tokens_is_refused() -> None:
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)
    states = [torch.zeros(1, 1, 4, 8) for _ in range(3)]
    mask = torch.ones(4, 4, dtype=torch.bool)
    with (
        context_parallel(mesh, buffers=[], buffer_seq_dims=[]),  # type: ignore[arg-type]
        pytest.raises(OptionError, match="train: --cp needs attention without a mask"),
    ):
        functional.scaled_dot_product_attention(*states, attn_mask=mask, is_causal=False)
