# SPDX-License-Identifier: Apache-2.0
"""A model of thirty thousand weights in a folder, with a chat template or without a tokenizer, conversations in a file,
a few training steps by a setup, and what happens at one of them."""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from liger_core.errors import OptionError
from liger_train import auto_checkpoint, techniques
from liger_train.model import Built, build
from liger_train.runs.arguments import training_arguments
from liger_train.setup import Setup
from liger_train.sharded_loading import give_shards
from liger_train.text import Sequences

# Wide enough that weights are split, and that 8-bit optimizers, which leave the smallest alone, have something to do.
FIELDS = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
STEPS = 3


needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)


class At(TrainerCallback):
    """Does something when a step begins."""

    def __init__(self, step: int, do: Callable[[], object]) -> None:
        self.step, self.do = step, do

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.do()


def refused(sentence: str) -> Any:
    """Expect an OptionError with this sentence."""
    return pytest.raises(OptionError, match=sentence)


def multiplies_by_rows() -> bool:
    """Whether PyTorch multiplies float8 matrices with one scale per row on the CPU."""
    one, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(one, one.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def fail_in_a_checkpoint(error: Exception) -> NoReturn:
    """Raise an error as a checkpointed layer does before torch 2.13: a frame keeps hooks of saved tensors."""

    def recompute(nothing: None) -> NoReturn:
        raise AssertionError("a later backward pass recomputes the layer that failed")

    def hooks() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, recompute):
            yield

    checkpoint = hooks()
    next(checkpoint)
    raise error


def saved_model(folder: Path, kind: str = "llama", **fields: Any) -> Path:
    """Written by Transformers, so that every way of sharding begins with the same weights.

    `fields` go over those above.
    """
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(FIELDS | fields))).save_pretrained(folder)
    return folder


def setup_of(folder: Path, **options: Any) -> Setup:
    plain = {
        "precision": "fp32", "checkpoint": "none", "liger": "none", "device": "cpu", "steps": STEPS,
        "learning_rate": 3e-3,
    }  # fmt: skip
    return Setup(str(folder), batch=2, sequence=16, **(plain | options))


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    built: Built
    trainer: Trainer
    notes: list[str]


def trained(setup: Setup) -> Trained:
    """The losses of every micro-batch. All sequences are alike, so that they fall."""
    techniques.check(setup)
    losses: list[float] = []
    notes: list[str] = []

    class Recording(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    with tempfile.TemporaryDirectory() as place:
        arguments = training_arguments(setup, Path(place))
        built = build(setup, arguments.device)
        data = Sequences(torch.arange(16).mul(7).remainder(128).expand(64, 16))
        callbacks = list(auto_checkpoint.observers(setup, notes.append))
        trainer = Recording(model=built.model, args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        give_shards(trainer.accelerator)
        trainer.train()
    return Trained(losses, built, trainer, notes)


def twice(setup: Setup) -> tuple[Trained, Trained]:
    """Without Liger and with it."""
    return trained(replace(setup, liger="none")), trained(replace(setup, liger="all"))


CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor "
    "%}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "[gMask]", "<sop>", "<|user|>", "<|assistant|>", "<|endoftext|>")

USER, FOUR = {"role": "user", "content": "what is two and two"}, {"role": "assistant", "content": "four"}


def model_with(template: str | None, folder: Path, end: str = "<|im_end|>") -> Path:
    """A model whose tokenizer knows bytes, groups of newlines as Llama 3 and Qwen do, and special tokens."""
    saved_model(folder, vocab_size=400, max_position_embeddings=1024)
    inner = Tokenizer(models.BPE())
    newlines = pre_tokenizers.Split(Regex(r"[^\s\w]?\w+|\s*[\r\n]+|\s+|[^\s\w]+"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [newlines, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(["a\n\nb\n\n what is two and two and three four seven of course"] * 9, trainer)
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end, pad_token="<|pad|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def written(path: Path, rows: list[Any]) -> str:
    """Rows in a file of JSON lines; strings are lines as they are."""
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)
