# SPDX-License-Identifier: Apache-2.0
"""The setups of pages, by the names in their comments `<!-- setup: … -->`."""

from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from docs.pages import Run


def model(run: Run, namespace: dict[str, Any]) -> None:
    """A causal language model, in training mode."""
    namespace["model"] = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B").to(run.device).train()


def batch(run: Run, namespace: dict[str, Any]) -> None:
    """Token ids with labels, as a collator would make them."""
    ids = torch.randint(3, 300, (2, 16), device=run.device)
    namespace["batch"] = {"input_ids": ids, "labels": ids.clone()}


def book(run: Run, namespace: dict[str, Any]) -> None:
    """A text to train on, in the file book.txt."""
    (run.folder / "book.txt").write_text("The logits of a batch need not exist.\n" * 100)


def tensors(run: Run, namespace: dict[str, Any]) -> None:
    """Rows and a weight, and the arguments of LM head and loss."""
    rows, width, classes = 12, 32, 50
    namespace["x"] = torch.randn(rows, width, device=run.device, requires_grad=True)
    namespace["residual"] = torch.randn(rows, width, device=run.device)
    namespace["weight"] = torch.ones(width, device=run.device, requires_grad=True)
    namespace["hidden"] = torch.randn(rows, width, device=run.device, requires_grad=True)
    namespace["lm_head"] = torch.nn.Linear(width, classes, bias=False, device=run.device)
    namespace["labels"] = torch.randint(classes, (rows,), device=run.device)


def float32_on_the_cpu(run: Run, namespace: dict[str, Any]) -> None:
    """TRL trains in bfloat16 by default, which Transformers refuses on the CPU; and losses are compared more closely in
    float32."""
    if run.device != "cpu":
        return
    ready = TrainingArguments.__post_init__

    def post_init(self: TrainingArguments) -> None:
        self.use_cpu, self.bf16 = True, False
        ready(self)

    run.monkeypatch.setattr(TrainingArguments, "__post_init__", post_init)


def quick_compiler(run: Run, namespace: dict[str, Any]) -> None:
    """On the CPU, graphs are traced and run eagerly: Inductor would compile C++ for a minute.

    Graph breaks are counted from here.
    """
    torch._dynamo.utils.counters.clear()
    if run.device == "cpu":
        run.monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def deepspeed_on_the_cpu(run: Run, namespace: dict[str, Any]) -> None:
    if run.device == "cpu":
        run.monkeypatch.setenv("DS_ACCELERATOR", "cpu")


SETUPS = {
    function.__name__: function
    for function in (model, batch, book, tensors, float32_on_the_cpu, quick_compiler, deepspeed_on_the_cpu)
}
