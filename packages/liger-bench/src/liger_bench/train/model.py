# SPDX-License-Identifier: Apache-2.0
"""From a setup to the model that is trained: shape or name, precision, adapters, checkpointing, Liger."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from liger_bench.train import checkpointing
from liger_bench.train.combinations import ZERO
from liger_bench.train.setup import Setup
from liger_bench.train.shapes import SHAPES, shape
from liger_core.errors import OptionError
from liger_hf.hub import hub_is_reachable
from liger_hf.presets import NAMES, did_you_mean

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}
LOSS = "linear_cross_entropy"
RANK, ALPHA = 16, 32


@dataclass(frozen=True)
class Built:
    """A model that is ready to train.

    replaced  the ops that Liger put in, and how often
    notes     what was decided for the user, one sentence each
    """

    model: Any
    replaced: str
    notes: list[str]


def build(setup: Setup, device: torch.device) -> Built:
    """The model of a setup: the same random weights for the same seed, or those of a folder or name.

    It is on the device, but for a sharded one, which comes there piece by piece. Under FakeTensorMode nothing is allocated.

    Raises OptionError for a model that cannot be found.
    """
    torch.manual_seed(setup.seed)
    notes: list[str] = []
    model = _quantized(setup, device) if setup.adapter == "qlora" else _loaded(setup, device)
    if setup.adapter != "none":
        model = _adapted(model, setup, notes)
    model.train()
    checkpointing.enable(model, setup.checkpoint)
    # Last: adapters wrap the modules that it looks at.
    return Built(model, _patched(model, setup.liger, notes), notes)


def config_of(setup: Setup) -> Any:
    """The config of a setup's model: a named shape, else that in a folder or on the hub."""
    if setup.model in SHAPES:
        return shape(setup.model, setup.sequence)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(setup.model, use_cache=False, **loading_options(setup))
    except (OSError, ValueError) as problem:
        raise _not_found(setup.model, problem) from problem


def weights_dtype(setup: Setup) -> torch.dtype:
    """Weights are float32 if they are trained, unless DeepSpeed keeps a float32 copy of them in its optimizer."""
    low = setup.precision == "bf16-pure" or setup.adapter != "none" or setup.shard in ZERO
    return LOW.get(setup.precision, torch.float32) if low else torch.float32


def _loaded(setup: Setup, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    config, dtype = config_of(setup), weights_dtype(setup)
    if _is_random(setup):
        with contextlib.nullcontext() if _comes_in_pieces(setup) else device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=setup.trust_remote_code)
    place = {} if _comes_in_pieces(setup) else {"device_map": {"": device}}
    try:
        return AutoModelForCausalLM.from_pretrained(setup.model, config=config, dtype=dtype, **loading_options(setup), **place)
    except (OSError, ValueError) as problem:
        raise _not_found(setup.model, problem) from problem


def _is_random(setup: Setup) -> bool:
    return setup.model in SHAPES or setup.random_weights


def _comes_in_pieces(setup: Setup) -> bool:
    """Whether no device holds the whole model: DeepSpeed's stage 3 and FSDP2 bring it there layer by layer."""
    return setup.shard in ("zero3", "fsdp2")


def _quantized(setup: Setup, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    low = LOW.get(setup.precision, torch.float32)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=low)
    options: dict[str, Any] = {"config": config_of(setup), "dtype": low, "quantization_config": four_bits, "device_map": {"": device}}
    if not _is_random(setup):
        try:
            return AutoModelForCausalLM.from_pretrained(setup.model, **loading_options(setup), **options)
        except (OSError, ValueError) as problem:
            raise _not_found(setup.model, problem) from problem
    with device:
        random = AutoModelForCausalLM.from_config(config_of(setup), dtype=low, trust_remote_code=setup.trust_remote_code)
    return type(random).from_pretrained(None, state_dict=random.state_dict(), **options)


def _adapted(model: Any, setup: Setup, notes: list[str]) -> Any:
    peft = importlib.import_module("peft")
    if setup.adapter == "qlora":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapters = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, adapters)
    notes.append(note_of_adapters(setup))
    return model


def note_of_adapters(setup: Setup) -> str:
    frozen = "4 bits" if setup.adapter == "qlora" else str(weights_dtype(setup)).removeprefix("torch.")
    own = frozen if setup.shard in ZERO else "float32"
    return f"Adapters of rank {RANK} beside every linear layer are trained, in {own}; the frozen weights are in {frozen}."


def _patched(model: nn.Module, wanted: str, notes: list[str]) -> str:
    if wanted == "none":
        return ""
    import liger_hf
    from liger_hf.causal_mask import NOTE

    names: dict[str, Any] = {"all": {}, "all-but-loss": {"exclude": [LOSS]}}.get(wanted, {"only": wanted.split(",")})
    report = liger_hf.apply(model, **names)
    # It is not compiled here.
    notes.extend(note for note in report.notes if note != NOTE)
    notes.extend(f"Liger left {row.count} × {row.pattern} alone: {row.reason}." for row in report.rows if _left_without_being_told(row))
    return ", ".join(f"{op} {count}" for op, count in report.replaced.items())


def _left_without_being_told(row: Any) -> bool:
    return row.verdict == "left" and row.reason != "not asked for"


def loading_options(setup: Setup) -> dict[str, Any]:
    """Where a model's files may come from, and whether code among them may run: if that is left open, Transformers asks standard input.

    Without a hub there is what an earlier download has left; else the libraries would ask for it again and again.
    """
    return {
        "local_files_only": Path(setup.model).exists() or not hub_is_reachable(),
        "trust_remote_code": setup.trust_remote_code,
    }


def has_code_of_its_own(name: str, problem: Exception) -> OptionError | None:
    """The sentence for what Transformers raises if a model or tokenizer is code that may not run; None for any other problem."""
    if "trust_remote_code" not in str(problem):
        return None
    return OptionError(
        f"train: --model {name} comes with Python code of its own, which runs only with --trust-remote-code; read the code before you give it"
    )


def _not_found(name: str, problem: Exception) -> OptionError:
    if (refused := has_code_of_its_own(name, problem)) is not None:
        return refused
    reason = str(problem).strip().split("\n")[0].rstrip(".")
    if not Path(name).exists() and not hub_is_reachable():
        reason = "no such folder, and the hub cannot be reached"
    elif (Path(name) / "config.json").is_file():
        reason += "; --random-weights takes only its config"
    return OptionError(
        f"train: --model must be {NAMES}, a folder with a config.json and weights, or a name on the hub, "
        f"got {name!r}: {reason}.{did_you_mean(name)}"
    )
