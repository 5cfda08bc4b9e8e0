# SPDX-License-Identifier: Apache-2.0
"""`--set NAME=VALUE`: fields of transformers.TrainingArguments for which `liger train` has no option of its own."""

import shlex
from argparse import ArgumentError
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from liger_core.errors import nearest
from liger_train.errors import SetupError

# Field → the option to use instead, or what sets the field, as the end of an error message.
OPTIONS = {
    name: words
    for names, words in (
        ("output_dir", "use --output"),
        ("max_steps", "use --steps"),
        ("per_device_train_batch_size", "use --batch"),
        ("per_device_eval_batch_size", "--batch sets it, too"),
        ("auto_find_batch_size", "use --batch auto"),
        ("gradient_accumulation_steps", "use --accumulation"),
        ("learning_rate", "use --learning-rate"),
        ("seed data_seed", "use --seed"),
        ("full_determinism", "use --deterministic"),
        ("use_cpu", "use --device"),
        ("bf16", "use --precision bf16"),
        ("fp16", "use --precision fp16"),
        ("optim optim_args optim_target_modules", "use --optimizer"),
        ("gradient_checkpointing gradient_checkpointing_kwargs", "use --checkpoint"),
        ("torch_compile torch_compile_backend torch_compile_mode", "use --compile"),
        ("use_liger_kernel liger_kernel_config", "use --liger"),
        ("deepspeed", "use --shard zero1, zero2 or zero3"),
        ("fsdp fsdp_config", "use --shard fsdp2"),
        ("parallelism_config", "use --tp and --cp"),
        ("save_strategy save_steps", "use --save-every"),
        ("save_total_limit", "--output keeps the two most recent checkpoints"),
        ("save_only_model", "--output saves all that --resume needs"),
        ("resume_from_checkpoint", "use --resume"),
        ("local_rank", "run it under torchrun"),
        ("ddp_backend", "it depends on --device and --shard"),
        ("accelerator_config", "it depends on --shard and --tp"),
        ("dataloader_drop_last", "the text is cut into whole steps"),
        ("skip_memory_metrics", "liger train measures the peak memory"),
        ("disable_tqdm", "liger train has its own progress bar"),
        ("do_train do_eval do_predict", "only scripts read it"),
    )
    for name in names.split()
}
# Old names → names in Transformers 5, which takes a number below 1 as a share of the steps.
FORMER = {"warmup_ratio": "warmup_steps"}
EPOCHS = "num_train_epochs"
# Fields that determine when the validation loss is computed.
EVALUATION = ("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "load_best_model_at_end")


def joined(words: Iterable[str]) -> str:
    """Join NAME=VALUE words into one string, sorted by name.

    Raises OptionError for a word without a name, and for a name given twice.
    """
    values_by_name: dict[str, str] = {}
    for word in words:
        name, equals, value = (piece.strip() for piece in word.partition("="))
        name = name.removeprefix("--").replace("-", "_")
        if not (name and equals and value):
            raise SetupError(f"--set must be a name and a value, for instance weight_decay=0.1, got {word!r}")
        if name in values_by_name:
            raise SetupError(f"--set must name each field once, got {name} twice")
        values_by_name[name] = value
    return shlex.join(f"{name}={value}" for name, value in sorted(values_by_name.items()))


def strings(text: str) -> dict[str, str]:
    """Return name → value, both as strings."""
    return dict(word.split("=", 1) for word in shlex.split(text))


def epochs(text: str) -> float | None:
    """Return the number of epochs if one is set, and None otherwise."""
    value = strings(text).get(EPOCHS)
    return None if value is None else float(value)


def values(text: str, reserved: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return name → value in the type that TrainingArguments declares; other options set the fields in `reserved`.

    Raises OptionError for an unknown field, an invalid value, and a field that other options set.
    """
    if not text:
        return {}
    words = strings(text)
    from transformers import HfArgumentParser, TrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise SetupError(
                f"--set must have values that TrainingArguments accepts, got {shlex.join(arguments)}: {message}"
            )

    parser = Parser(TrainingArguments, allow_abbrev=False)  # type: ignore[arg-type]
    known = TrainingArguments.__dataclass_fields__
    for name in words:
        if name in OPTIONS:
            raise SetupError(f"--set cannot set {name}; {OPTIONS[name]}")
        if name not in known and FORMER.get(name) not in known:
            raise SetupError(
                "--set must name a field of transformers.TrainingArguments, got "
                f"{name!r}.{nearest(name, [*known, *FORMER])}"
            )
        if name in (reserved or {}):
            raise SetupError(f"--set cannot set {name}, which another option sets; leave it out")
    renamed = {name if name in known else FORMER[name]: value for name, value in words.items()}
    if len(renamed) < len(words):
        raise SetupError("--set must name each field once, got warmup_ratio and warmup_steps, which are one; give one")
    arguments = [f"--{name}={value}" for name, value in renamed.items()]
    try:
        parsed = vars(parser.parse_args(arguments))
    except ArgumentError as error:
        parser.error(str(error))
    values_by_name = {name: parsed[name] for name in renamed}
    if "report_to" in values_by_name:
        values_by_name["report_to"] = _integrations(values_by_name["report_to"])
    if EPOCHS in values_by_name and not 0 < values_by_name[EPOCHS] < float("inf"):
        raise SetupError(f"--set {EPOCHS} must be a positive number, got {values_by_name[EPOCHS]}")
    return values_by_name


def _integrations(word: str) -> list[str]:
    """Return the integrations to report to; check them now, since Transformers would only after loading the model."""
    from transformers.integrations import get_reporting_integration_callbacks

    names = [name.strip() for name in word.split(",")]
    if names in (["none"], ["all"]):
        return names
    try:
        get_reporting_integration_callbacks(names)
    except ValueError as error:
        raise SetupError(
            f"--set report_to must be integrations of Transformers, separated by commas, got {word!r}: {error}"
        ) from None
    return names
