# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers before and after Liger: speed and peak memory at one length, and the longest sequence that fits.

    python benchmarks/trainers.py --trainer sft --trainer dpo --memory-limit 79 --out benchmarks/results/trl

It needs trl and datasets. The model has the sizes of Gemma 3 1B with full attention, and random weights in bfloat16.
All steps get the same batch: one sequence for SFT, GRPO and RLOO, a pair for DPO, a desirable and an undesirable answer
for KTO. GRPO and RLOO do not generate. Everything else is TRL's default: checkpointed layers, AdamW, the fused head.
`liger` adds `LigerCallback` and `use_in_trl`. Each pair of trainer and head has its own process, whose allocator is
limited. Rows are appended to trl.json. A second start skips those of the same machine, versions and commit.
"""

import argparse
import contextlib
import copy
import importlib.metadata
import json
import math
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pairs import measure_each
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

import liger_hf
from liger_bench import machine
from liger_bench.process import failure
from liger_bench.results import append_json, read_json
from liger_hf.presets import PRESETS, preset
from liger_train.plan.search import largest
from liger_train.runs.devices import release

FILE, GIB = "trl.json", 2**30
HEADS = ("trl", "liger")
# Sequences of a batch.
TRAINERS = {"sft": 1, "dpo": 2, "kto": 2, "grpo": 1, "rloo": 1}
IDENTITY = ("trainer", "head", "model", "length", "memory_limit", *machine.ENVIRONMENT)
# A length is a multiple of it.
UNIT, LONGEST, PROMPT = 1024, 1 << 18, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", action="append", choices=TRAINERS, help="a trainer; repeatable; all by default")
    parser.add_argument("--head", action="append", choices=HEADS, help="repeatable; both by default")
    parser.add_argument("--model", choices=PRESETS, default="gemma-3-1b")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence that is timed")
    parser.add_argument("--memory-limit", type=float, default=79.0, help="GiB that the allocator may take")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after one more")
    parser.add_argument("--no-longest", action="store_true", help="do not look for the longest sequence")
    parser.add_argument("--out", type=Path, default=Path("results/trl"))
    measure_each(parser, lambda chosen: product(chosen.trainer or TRAINERS, chosen.head or HEADS), measure)


def measure(args: argparse.Namespace, trainer: str, head: str) -> None:
    """Measure one pair and append its row."""
    device = machine.measurable_device("trainers", "auto")
    setup = {"trainer": trainer, "head": head, "model": args.model, "length": args.length}
    row = setup | {"memory_limit": args.memory_limit, "device": device.type} | machine.describe(device)
    row["versions"] += f", trl {importlib.metadata.version('trl')}"
    path = args.out / FILE
    if any(all(known.get(name) == row[name] for name in IDENTITY) for known in read_json(path)):
        print(f"{trainer}, {head}: measured before", flush=True)
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_limit * GIB / total))
    with liger_hf.use_in_trl() if head == "liger" else contextlib.nullcontext():
        job = Job(trainer, head, args.model, device)
        seconds, peak = job.run(args.length, args.steps + 1)
        row["tokens_per_second"] = TRAINERS[trainer] * args.length / seconds
        row["peak_bytes"] = peak
        if not args.no_longest:
            row["longest"] = job.longest(args.length, args.memory_limit * GIB)
    args.out.mkdir(parents=True, exist_ok=True)
    append_json([row], path)
    print(json.dumps({name: row[name] for name in (*setup, "tokens_per_second", "peak_bytes")} | {
        "longest": row.get("longest")}), flush=True)  # fmt: skip


class Job:
    """One trainer of TRL on one model; each run has another length."""

    def __init__(self, trainer: str, head: str, model: str, device: torch.device) -> None:
        self.name, self.head, self.device = trainer, head, device
        torch.manual_seed(0)
        config = preset(model)
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
            # Gemma 3 makes the mask of a window even if no layer has one, unless no sequence is as long.
            config.sliding_window = 2 * LONGEST
        with device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.reference = copy.deepcopy(self.model) if trainer in ("dpo", "kto") else None
        self.vocabulary = config.vocab_size
        self.optimizer: Any = None

    def longest(self, length: int, limit: float) -> int:
        """Return the longest sequence that fits, at most LONGEST; the search starts at twice `length`."""

        def size(count: int) -> float:
            # What an earlier run out of memory left behind.
            self.model.zero_grad(set_to_none=True)
            release(self.device)
            try:
                # The optimizer has its state, so one step has the peak.
                return self.run(count * UNIT, 1)[1]
            except Exception as error:
                if not failure(error)[1].get("out_of_memory"):
                    raise
                return math.inf

        return largest(size, limit, LONGEST // UNIT, max(1, 2 * length // UNIT)) * UNIT

    def run(self, length: int, steps: int) -> tuple[float, int]:
        """Return the median seconds of a step, without the first of several, and the peak memory."""
        clock = Clock(self.device)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make(self, folder, steps, batch(self.name, length, self.vocabulary, self.device), clock)
            trainer.train()
        self.optimizer = trainer.optimizer.optimizer
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return statistics.median(clock.seconds[1:] or clock.seconds), peak


class Clock(TrainerCallback):
    """Times steps and starts the count of the peak memory with a run."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.seconds, self.start = device.type == "cuda", [], 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = self.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(self.now() - self.start)

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def make(job: Job, folder: str, steps: int, made: dict[str, Any], clock: Clock) -> Any:
    """Return TRL's trainer, which gets the same batch in each step."""
    import datasets
    import trl

    cpu = job.device.type == "cpu"
    common: dict[str, Any] = {"max_steps": steps, "per_device_train_batch_size": 2, "report_to": [], "bf16": not cpu}
    common |= {"save_strategy": "no", "logging_steps": 10**6, "disable_tqdm": True, "use_cpu": cpu}
    words = {"prompt": "a b", "completion": " c d", "chosen": " c d", "rejected": " d c", "text": "a b c"}
    columns = {
        "sft": ("text",), "dpo": ("prompt", "chosen", "rejected"), "kto": ("prompt", "completion", "label"),
        "grpo": ("prompt",), "rloo": ("prompt",),
    }[job.name]  # fmt: skip
    # A model gets its rows from here; what the trainer makes of them is replaced by the batch.
    rows = [words | {"label": index % 2 == 0} for index in range(2 * steps)]
    data = datasets.Dataset.from_list([{name: row[name] for name in columns} for row in rows])
    kind, config = getattr(trl, f"{job.name.upper()}Trainer"), getattr(trl, f"{job.name.upper()}Config")

    class Same(kind):  # type: ignore[misc, valid-type]
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([made] * steps, batch_size=None)

        def _prepare_inputs(self, inputs: Any) -> Any:
            return dict(inputs)

    callbacks = [clock, *([liger_hf.LigerCallback(show=None)] if job.head == "liger" else [])]
    arguments: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer(), "callbacks": callbacks}
    # Without an optimizer, the trainer makes its own.
    arguments["optimizers"] = (job.optimizer, None)
    if job.name in ("grpo", "rloo"):
        common |= {"num_generations": 2, "beta": 0.0}
        return Same(job.model, reward_funcs=lambda completions, **_: [0.0] * len(completions),
                    args=config(folder, **common), **arguments)  # fmt: skip
    if job.reference is not None:
        arguments["ref_model"] = job.reference
    return Same(job.model, args=config(folder, **common), **arguments)


def batch(trainer: str, length: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """Return what the trainer's collator, or its generation, would give: sequences of a prompt and an answer."""
    count = TRAINERS[trainer]
    ids = torch.randint(vocabulary, (count, length), device=device, generator=torch.Generator(device).manual_seed(0))
    ones, completion = torch.ones_like(ids), torch.ones_like(ids)
    completion[:, :PROMPT] = 0
    if trainer == "sft":
        return {"input_ids": ids, "attention_mask": ones, "labels": ids.masked_fill(completion == 0, -100)}
    if trainer in ("dpo", "kto"):
        made = {"input_ids": ids, "attention_mask": ones, "completion_mask": completion}
        kl = {f"KL_{name}": value for name, value in made.items()} | {"label": torch.tensor([True, False])}
        return made if trainer == "dpo" else made | kl
    made = {"prompt_ids": ids[:, :PROMPT], "prompt_mask": ones[:, :PROMPT], "completion_ids": ids[:, PROMPT:]}
    made |= {"completion_mask": ones[:, PROMPT:], "advantages": torch.ones(count, device=device)}
    if trainer == "rloo":
        return made | {"old_logps": torch.full((count,), -1.0, device=device)}
    return made | {"num_items_in_batch": torch.tensor(count * (length - PROMPT), device=device)}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(("<pad>", "<s>", "</s>", *"abcd"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


if __name__ == "__main__":
    main()
