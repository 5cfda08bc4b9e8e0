# SPDX-License-Identifier: Apache-2.0
"""Train with and without Liger, and compare the runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from transformers import TrainerCallback

from liger_bench import machine
from liger_bench.memory import peak_bytes
from liger_core import explain, linear_cross_entropy
from liger_train.model import build
from liger_train.row import Row
from liger_train.runs.run import run
from liger_train.setup import Setup

# The allowed difference of losses in float32, where the runs differ only in the order of sums.
FLOAT32_BOUND = 1e-3
# In a lower precision, the allowed difference is this multiple of the difference that reordered sums make. It is above
# 1 because Liger replaces more operations than that, and both differences are maxima over a few dozen random ones.
NOISE_FACTOR = 3.0
# Speeds are comparable if the 80th percentile of the steps is at most this multiple of the 20th.
CLEAR_SPREAD = 1.25
WORDS = {"hf": "without Liger", "liger": "with Liger", "reordered": "without Liger, with sums in another order"}


class EagerAttention(TrainerCallback):
    """Computes attention by separate operations, not by a fused kernel."""

    def on_train_begin(self, *args: Any, model: Any = None, **more: Any) -> None:
        model.set_attn_implementation("eager")


def compare(setup: Setup, bar: Progress) -> dict[str, Any]:
    """Train with and without Liger, and return a comparison of losses, speed and memory, or a reason if a run fails.

    In a lower precision than float32, a third run without Liger has sums in another order: eager attention, and each
    batch in two halves.
    """
    plain = replace(setup, liger="none")
    runs: dict[str, tuple[Setup, Sequence[TrainerCallback]]] = {"hf": (plain, ()), "liger": (setup, ())}
    if setup.precision != "fp32":
        halves = 2 if setup.batch % 2 == 0 else 1
        reordered = replace(plain, batch=setup.batch // halves, accumulation=halves)
        runs["reordered"] = reordered, (EagerAttention(),)
    rows: dict[str, Row] = {}
    for name, (each, observers) in runs.items():
        bar.console.print(f"Training {WORDS[name]}", highlight=False)
        rows[name] = row = run(each, observers=observers, bar=bar)
        if row.tokens_per_second is None or row.interrupted:
            return {"reason": row.reason or "interrupted"}
    hf, liger = rows["hf"], rows["liger"]
    bar.add_task("measuring the memory of LM head and loss", total=None)
    return {
        **compare_losses({name: row.losses or [] for name, row in rows.items()}),
        **{f"peak_memory_{name}_bytes": rows[name].peak_bytes for name in ("hf", "liger")},
        **loss_memory(plain, machine.measurable_device("demo", setup.device)),
        **{f"tokens_per_second_{name}": rows[name].tokens_per_second for name in ("hf", "liger")},
        "speed_is_clear": speed_is_clear(hf) and speed_is_clear(liger),
        "parameters": hf.parameters,
        "replaced": liger.replaced,
        "device": setup.device,
        "dtype": "float32" if setup.precision == "fp32" else "bfloat16",
        "model": setup.model,
        "steps": setup.steps,
        "batch": setup.batch,
        "sequence": setup.sequence,
        "gradient_checkpointing": setup.checkpoint == "full",
        **{name: getattr(liger, name) for name in ("machine", "versions", "commit", "date")},
    }


def compare_losses(losses: dict[str, list[float]]) -> dict[str, Any]:
    """Return the difference of the losses with and without Liger, its bound, and whether it is within the bound."""
    difference = largest_difference(losses["hf"], losses["liger"])
    noise = largest_difference(losses["hf"], losses["reordered"]) if "reordered" in losses else None
    allowed = FLOAT32_BOUND if noise is None else NOISE_FACTOR * noise
    return {
        "loss_hf": losses["hf"][-1],
        "loss_liger": losses["liger"][-1],
        "losses_hf": losses["hf"],
        "losses_liger": losses["liger"],
        "losses_reordered": losses.get("reordered"),
        "max_loss_difference": difference,
        "loss_noise": noise,
        "loss_difference_bound": allowed,
        "passed": difference <= allowed < math.inf,
    }


def largest_difference(losses: Sequence[float], other_losses: Sequence[float]) -> float:
    """Return the largest difference, or infinity if any is not finite."""
    differences = [abs(a - b) for a, b in zip(losses, other_losses, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def speed_is_clear(row: Row) -> bool:
    """Return whether the steps of a run took about equally long; otherwise, other processes distorted its speed."""
    low, high = row.low_tokens_per_second, row.high_tokens_per_second
    return low is not None and high is not None and high <= CLEAR_SPREAD * low


def loss_memory(setup: Setup, device: torch.device) -> dict[str, Any]:
    """Return the peak bytes of LM head and loss, forward and backward, and the backend of Liger's op.

    The gradients of hidden states and head weight count; hidden states, head weight and labels do not.
    """
    model = build(setup, device).model
    shape = (setup.batch, setup.sequence)
    labels = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        hidden: Tensor = model.base_model(input_ids=labels).last_hidden_state
    hidden = hidden.detach().requires_grad_()
    head = model.get_output_embeddings()
    targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()

    def plain() -> None:
        size = model.config.vocab_size
        model.loss_function(logits=head(hidden), labels=labels, vocab_size=size).backward()

    def liger() -> None:
        linear_cross_entropy(hidden, head.weight, targets).backward()

    result: dict[str, Any] = {"backend": explain(linear_cross_entropy, hidden, head.weight, targets).backend}
    for name, function in (("hf", plain), ("liger", liger)):
        # The first call may allocate memory that later calls reuse.
        function()
        hidden.grad = head.weight.grad = None
        result[f"peak_loss_memory_{name}_bytes"] = peak_bytes(function, device)
        hidden.grad = head.weight.grad = None
    return result
