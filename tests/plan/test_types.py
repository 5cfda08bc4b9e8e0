# SPDX-License-Identifier: Apache-2.0
"""Every causal language model type of Transformers gets a plan, or a sentence that says why not."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging import version

from hf.tiny_configs import TYPES, tiny_config
from liger_core import OptionError
from liger_train.plan.step import predict
from liger_train.setup import Setup

pytestmark = [pytest.mark.slow, pytest.mark.cpu]

NO_CHECKPOINTING = r"^train: --checkpoint must be none, since \w+ does not support it, got 'full'$"
READS_VALUES = r"^plan: the model must be able to take a step on fake tensors, but .* is not: it reads values of tensors \(aten\.\w+\.default\); "
FAILS = r"^plan: the model must be able to take a step on fake tensors, but .* is not: \w+Error: .*; to measure its memory, run `liger train`$"
# Since Transformers 5.24, the expert layers of Aria read no values, the configurations of MusicGen lack a field that
# its decoder reads, and Llama 4 reads a field of its language model's outputs that they do not have.
NEW = version.parse(transformers.__version__) >= version.parse("5.24")
# What has no plan, and how that begins.
UNPLANNED: dict[str, str] = {
    **dict.fromkeys(
        ("cpmant", "ctrl", "gpt_neox_japanese", "jetmoe", "openai-gpt", "reformer", "xlm", "xlnet"), NO_CHECKPOINTING
    ),
    **dict.fromkeys(("blt", "dbrx", "longcat_flash"), READS_VALUES),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text", "xmod"), READS_VALUES),
    **dict.fromkeys(("llama4", "musicgen", "musicgen_melody") if NEW else (), FAILS),
    **dict.fromkeys(() if NEW else ("aria_text",), READS_VALUES),
    **dict.fromkeys(() if find_spec("timm") else ("gemma3n",), FAILS),
    # With pixels; of a model that only drafts for another one.
    **dict.fromkeys(("git", "gemma4_assistant", "gemma4_unified_assistant"), FAILS),
}


def setup_of(model_type: str, folder: Path, **options: Any) -> Setup:
    try:
        tiny_config(model_type).save_pretrained(folder)
    except Exception as problem:
        pytest.skip(f"its tiny configuration cannot be written: {type(problem).__name__}")
    return Setup(str(folder), 2, 32, **{"checkpoint": "full", **options})


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_has_a_plan_or_a_sentence(model_type: str, tmp_path: Path) -> None:
    setup = setup_of(model_type, tmp_path)
    if model_type not in UNPLANNED:
        assert predict(setup).held["weights"] > 0
        return
    with pytest.raises(OptionError) as raised:
        predict(setup)
    assert re.search(UNPLANNED[model_type], str(raised.value))


@pytest.mark.parametrize("model_type", ["ctrl", "openai-gpt", "xlnet"])
def test_without_checkpointing_these_have_a_plan(model_type: str, tmp_path: Path) -> None:
    assert predict(setup_of(model_type, tmp_path, checkpoint="none")).held["weights"] > 0
