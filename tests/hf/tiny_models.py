# SPDX-License-Identifier: Apache-2.0
"""Random models of the architectures that the tests patch, and what the tests measure on them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import liger_hf
from hf.tiny_configs import VOCABULARY, drawn
from liger_core.accuracy import judge
from liger_hf.isolation import DoublePrecision
from liger_hf.report import Row

# Where models and inputs are made; the fixture `place` sets it.
DEVICE = torch.device("cpu")
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "final_logit_softcapping": 7.0},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "granite": {"logits_scaling": 4.0},
}
ARCHITECTURES = tuple(OPTIONS)
LAYERS = COMMON["num_hidden_layers"]


def make(architecture: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    config = AutoConfig.for_model(architecture, **{**COMMON, **OPTIONS.get(architecture, {}), **options})
    return drawn(AutoModelForCausalLM.from_config(config)).to(DEVICE, dtype)


def tokens(batch: int = 2, length: int = 11, seed: int = 2) -> dict[str, Tensor]:
    """Inputs with labels, some of them ignored."""
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids.to(DEVICE), "labels": labels.to(DEVICE)}


def twin(model: nn.Module) -> Any:
    return copy.deepcopy(model)


def patched_twin(model: nn.Module, **options: Any) -> Any:
    """Return a patched copy of the model."""
    copied = twin(model)
    liger_hf.apply(copied, **options)
    return copied


def pair_of(plain: nn.Module, **options: Any) -> tuple[Any, Any]:
    """A patched copy of the model, and the model."""
    return patched_twin(plain, **options), plain


def pair(architecture: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """The same of a new model, both training."""
    return pair_of(make(architecture, dtype, **options).train())


def adapted(model: Any, target: str | None = None, **options: Any) -> Any:
    """The model with LoRA on a projection, or on all linear layers of its layers."""
    peft = pytest.importorskip("peft", reason="needs peft")
    targets: Any = "all-linear" if target is None else [target]
    options = {"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM"} | options
    return random_adapters(peft.get_peft_model(model, peft.LoraConfig(**options)).train())


def random_adapters(model: Any) -> Any:
    """The second factor of an adapter is not zero, so that both get a gradient."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif "lora_magnitude" in name:
                parameter.mul_(torch.rand(parameter.shape, generator=generator).to(parameter.device) + 0.5)
    return model


def checkpoint_layers(model: Any, reentrant: bool = False) -> None:
    """By its name since Transformers 5.23, or the older one."""
    start = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    start({"use_reentrant": reentrant})


def step(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter, by name."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, by its name in a model that is not compiled."""
    parameters = model.named_parameters()
    return {name.removeprefix("_orig_mod."): p.grad.clone() for name, p in parameters if p.grad is not None}


def losses_of(trainer: Any) -> list[float]:
    """The losses that a Trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def exact_step(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """The same, in float64 throughout."""
    with DoublePrecision():
        return step(twin(model).double(), **inputs)


def disagreements(results: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, str]:
    """The results that violate the accuracy criterion of the project, by name, with figures."""
    assert results.keys() == plain.keys() == exact.keys()
    dtype = next(value.dtype for name, value in plain.items() if name != "loss")
    found = {name: judge(result, plain[name], exact[name], dtype) for name, result in results.items()}
    return {name: problem for name, problem in found.items() if problem}


def step_disagreements(patched: nn.Module, plain: nn.Module, **inputs: Any) -> dict[str, str]:
    """The disagreements of a training step, on `tokens()` where no inputs are given."""
    inputs = inputs or tokens()
    return disagreements(step(patched, **inputs), step(plain, **inputs), exact_step(plain, **inputs))


def assert_same_step(
    patched: nn.Module, plain: nn.Module, *, rtol: float = 1e-4, atol: float = 1e-6, **inputs: Any
) -> None:
    """Compare loss and gradients of a training step, on `tokens()` where no inputs are given."""
    inputs = inputs or tokens()
    torch.testing.assert_close(step(patched, **inputs), step(plain, **inputs), rtol=rtol, atol=atol)


def rows_of(report: liger_hf.Report, op: str) -> list[Row]:
    return [row for row in report.rows if row.op == op]


def outcome(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """The outputs of a module, and the gradients of its inputs and parameters for upstream ones that rise from -1 to 1."""
    module.zero_grad()
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = module(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # The same values in every dtype.
    upstream = [torch.linspace(-1, 1, y.numel(), device=y.device).bfloat16().to(y.dtype).view_as(y) for y in outputs]
    torch.autograd.backward(outputs, upstream)
    results = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    results |= {f"gradient of input {i}": leaf.grad for i, leaf in enumerate(leaves)}  # type: ignore[misc]
    return results | gradients_of(module)


def module_disagreements(patched: nn.Module, plain: nn.Module, *inputs: Tensor) -> dict[str, str]:
    """The disagreements of outputs and gradients of a module."""
    with DoublePrecision():
        exact = outcome(twin(plain).double(), *(x.double() for x in inputs))
    return disagreements(outcome(patched, *inputs), outcome(plain, *inputs), exact)


@contextmanager
def no_logits() -> Iterator[None]:
    """All the logits of a training step are not made. (The check of apply makes some.)"""
    message = "all the logits of a training step were made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liger_hf.LazyLogits, "materialize", lambda self: pytest.fail(message))
        yield


def watched(
    function: Any,
    calls: list[Any],
    before: Callable[..., Any] = lambda *args, **options: True,
    after: Callable[..., Any] | None = None,
) -> Any:
    """A function or an op that notes its calls: what `before` makes of the arguments, also of a call that raises; or what
    `after` makes of the result and the arguments, unless it is None."""

    @wraps(function)
    def noted(*args: Any, **options: Any) -> Any:
        if after is None:
            calls.append(before(*args, **options))
        result = function(*args, **options)
        if after is not None and (entry := after(result, *args, **options)) is not None:
            calls.append(entry)
        return result

    return noted


def recorded(patch: pytest.MonkeyPatch, owner: Any, name: str, *before: Any, **after: Any) -> list[Any]:
    """The calls of what is known by this name from now on, as `watched` notes them."""
    calls: list[Any] = []
    patch.setattr(owner, name, watched(getattr(owner, name), calls, *before, **after))
    return calls


class LargestResult(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A transposed or reshaped weight is a view, no new memory.
        if not func.is_view:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.elements = max(self.elements, leaf.numel())
        return result
