# SPDX-License-Identifier: Apache-2.0
"""What is computed later, in the backward pass or when logits are read, is computed with the settings and random
numbers of the forward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf.tiny_models import gradients_of, make, pair_of, patched_twin, step, tokens, twin
from liger_hf.rules.head.log_prob import head_log_prob

pytestmark = pytest.mark.cpu

MLP = ["gate_proj", "up_proj", "down_proj"]


def adapted(targets: list[str], dropout: float = 0.0) -> Any:
    """A model with two adapters, "default" and "other", of which the first is active."""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=dropout)
    model = peft.get_peft_model(make(tie_word_embeddings=False), config)
    model.add_adapter("other", config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed_tokens" in name or "lora_" in name)
    return model.train()


def scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another adapter": lambda model: model.set_adapter("other"),
    "another scale": scale,
    "evaluation": lambda model: model.eval(),
    "frozen": lambda model: model.requires_grad_(False),
    "without adapters": lambda model: model.base_model.disable_adapter_layers(),
}
EACH_CHANGE = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def gradients(model: Any, change: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Those of a loss whose model changes before the backward pass."""
    torch.manual_seed(1)
    loss = model(**tokens()).loss
    change(model)
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


@pytest.mark.slow
@EACH_CHANGE
@pytest.mark.parametrize(("targets", "options"), [(["lm_head"], {}), (MLP, {"mlp_rows": 8})], ids=["head", "tiles"])
def test_the_backward_pass_is_that_of_the_forward_pass(
    targets: list[str], options: dict[str, Any], change: Callable[[Any], Any]
) -> None:
    plain = adapted(targets, dropout=0.3 if change is CHANGES["evaluation"] and not options else 0.0)
    patched = patched_twin(plain, **options)
    expected, found = gradients(plain, change), gradients(patched, change)
    # What is frozen before the backward pass gets no gradient.
    assert ("base_model.model.model.embed_tokens.weight" in expected) == (change is not CHANGES["frozen"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@EACH_CHANGE
def test_log_probabilities_of_a_head_get_the_gradients_of_the_forward_pass(change: Callable[[Any], Any]) -> None:
    plain = adapted(["lm_head"])
    hidden, target = torch.randn(7, plain.base_model.model.lm_head.in_features), torch.randint(300, (7,))
    results = []
    for ours in (True, False):
        model = twin(plain)
        head = model.base_model.model.lm_head
        rows = hidden.clone().requires_grad_()
        log_prob = head_log_prob(head, rows, target) if ours else -F.cross_entropy(head(rows), target, reduction="none")
        change(model)
        log_prob.sum().backward()
        results.append({"rows": rows.grad, **gradients_of(model)})
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@EACH_CHANGE
def test_logits_are_those_of_the_forward_pass(change: Callable[[Any], Any]) -> None:
    patched, plain = pair_of(adapted(["lm_head"]))
    found = []
    for model in (plain, patched):
        outputs = model(**tokens())
        change(model)
        found.append(outputs.logits + 0)
    torch.testing.assert_close(*found)


def test_logits_have_the_dropout_of_the_loss_and_draw_nothing_more() -> None:
    patched, plain = pair_of(adapted(["lm_head"], dropout=0.3))
    found = []
    for model in (plain, patched):
        torch.manual_seed(1)
        outputs = model(**tokens())
        found.append((outputs.loss, outputs.logits[:, :-1] + 0, torch.rand(())))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("change", [change for change in CHANGES.values() if change is not CHANGES["frozen"]])
def test_a_step_after_the_change_has_the_new_settings(change: Callable[[Any], Any]) -> None:
    patched, plain = pair_of(adapted(["lm_head"]))
    results = []
    for model in (plain, patched):
        gradients(model, change)
        results.append(step(model, **tokens()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
