# SPDX-License-Identifier: Apache-2.0
"""Lazy logits are those of the weights of the forward pass, or an error says that these are gone."""

import gc
import io
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizers

import liger_hf
from hf.test_logits_gradients import LOSSES, results
from hf.tiny_models import VOCABULARY, adapted, disagreements, make, pair, pair_of, patched_twin, step, tokens, twin
from liger_hf.rules.head.projection import LAZY
from liger_hf.rules.head.weights import OPTIMIZERS

pytestmark = [pytest.mark.slow, pytest.mark.cpu]


@pytest.fixture
def patched() -> Any:
    return patched_twin(make(tie_word_embeddings=False).train(), verify=False)


class ByData(torch.optim.Optimizer):
    """Writes where autograd does not look, as kernels of other libraries do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-0.1)


def imported(package: str, name: str, **options: Any) -> Callable[[Any], Any]:
    def make_optimizer(parameters: Any) -> Any:
        module: Any = pytest.importorskip(package, reason=f"needs {package}")
        return getattr(module, name)(list(parameters), lr=0.1, **options)

    return make_optimizer


ALL_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    f"{kind.__name__.lower()}{'_'.join(['', *options])}": partial(kind, lr=0.1, **options)
    for kind in (torch.optim.SGD, torch.optim.AdamW)
    for options in ({}, {"foreach": True}, {"fused": True})
} | {
    "bitsandbytes_adamw8bit": imported("bitsandbytes.optim", "AdamW8bit", min_8bit_size=1),
    "galore": imported("galore_torch", "GaLoreAdamW"),
    "apollo": imported("apollo_torch", "APOLLOAdamW"),
    "by_data": ByData,
    "accelerate": lambda parameters: Accelerator(cpu=True).prepare(torch.optim.AdamW(parameters, lr=0.1, fused=True)),
}


@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS.values(), ids=ALL_OPTIMIZERS)
def test_logits_cannot_be_read_after_a_step_of_any_optimizer(patched: Any, optimizer: Callable[[Any], Any]) -> None:
    made = optimizer(patched.parameters())
    outputs = patched(**tokens())
    outputs.loss.backward()
    expected = outputs.logits.detach().clone()
    fresh = patched(**tokens())
    fresh.loss.backward()
    made.step()
    message, target = (
        r"has been updated since the forward pass; read outputs\.logits before",
        tokens()["labels"].flatten(),
    )
    for read in (lambda z: z.argmax(-1), lambda z: F.cross_entropy(z.view(-1, VOCABULARY), target)):
        with pytest.raises(liger_hf.LogitsError, match=message):
            read(fresh.logits)
    # What was read before is there.
    with torch.no_grad():
        assert torch.equal(outputs.logits + 0, expected)
    made.zero_grad()
    assert patched(**tokens()).logits.argmax(-1).shape == (2, 11)


def test_logits_can_be_read_between_accumulated_backward_passes(patched: Any) -> None:
    optimizer = torch.optim.AdamW(patched.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        held = [patched(**tokens()) for _ in range(2)]
        for outputs in held:
            outputs.loss.backward()
            outputs.logits.argmax(-1)
        held = [patched(**tokens())]
        held[0].logits.argmax(-1)
        optimizer.step()
        optimizer.zero_grad()


def frozen_head(model: Any) -> Any:
    model.lm_head.requires_grad_(False)
    return model.parameters()


STEPS_OF_OTHERS: dict[str, Callable[[Any], Any]] = {
    "another_model": lambda model: make(tie_word_embeddings=False).parameters(),
    "a_frozen_head": frozen_head,
}


@pytest.mark.parametrize("parameters", STEPS_OF_OTHERS.values(), ids=STEPS_OF_OTHERS.keys())
def test_a_step_that_leaves_the_head_as_it_is_does_not_matter(patched: Any, parameters: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.AdamW(parameters(patched), lr=0.1, fused=True)
    outputs = patched(**tokens())
    outputs.loss.backward()
    before = outputs.logits.detach().clone()
    again = patched(**tokens())
    optimizer.step()
    assert torch.equal(again.logits.detach(), before)


def test_an_optimizer_that_is_compiled_sees_no_hook(patched: Any) -> None:
    optimizer = torch.optim.AdamW(patched.parameters(), lr=0.1)
    outputs = patched(**tokens())
    outputs.loss.backward()
    torch._dynamo.reset()
    torch.compile(optimizer.step, backend="eager")()
    with pytest.raises(liger_hf.LogitsError, match="has been updated"):
        outputs.logits.argmax(-1)
    torch._dynamo.reset()


def hooks() -> int:
    return len(torch_optimizers._global_optimizer_post_hooks)


def test_undo_takes_the_hook_on_optimizers_away(patched: Any) -> None:
    gc.collect()
    patched(**tokens())
    count = hooks()
    held = patched(**tokens())
    assert hooks() == count
    patched.liger_report.undo()
    # Somebody might still read these.
    assert hooks() == count
    held.loss.backward()
    torch.optim.AdamW(patched.parameters(), lr=0.1, fused=True).step()
    with pytest.raises(liger_hf.LogitsError, match="has been updated"):
        held.logits.argmax(-1)
    del held
    with liger_hf.apply(patched):
        patched(**tokens())
    assert not OPTIMIZERS.calls
    assert hooks() == count - 1


def test_outputs_and_weights_are_freed_with_the_last_reference(patched: Any) -> None:
    outputs = patched(**tokens())
    logits, hidden = weakref.ref(outputs.logits), weakref.ref(outputs.logits.hidden)
    del outputs
    assert logits() is None
    assert hidden() is None
    assert len(OPTIMIZERS.calls) == 0


def test_logits_cannot_be_read_after_the_hidden_states_were_changed_in_place(patched: Any) -> None:
    outputs = patched(**tokens(), output_hidden_states=True)
    with torch.no_grad():
        outputs.hidden_states[-1].mul_(2)
    message = "before the hidden states that the output head was called with are changed in place"
    for read in (
        lambda z: z.argmax(-1),
        lambda z: z[:, -1].argmax(-1),
        lambda z: F.cross_entropy(z.flatten(0, 1), torch.ones(22).long()),
    ):
        with pytest.raises(liger_hf.LogitsError, match=message):
            read(outputs.logits)


def others(model: Any, kind: str) -> dict[str, Tensor]:
    """Other weights for the model."""
    generator = torch.Generator().manual_seed(7)
    made = {name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    if kind == "parameters":
        return {name: nn.Parameter(p) for name, p in made.items()}
    return {name: p.requires_grad_(kind == "tensors") for name, p in made.items()}


KINDS = pytest.mark.parametrize("kind", ["parameters", "tensors", "constants"])
MODELS: dict[str, Callable[[], Any]] = {
    "untied": lambda: make(tie_word_embeddings=False),
    "tied": lambda: make(tie_word_embeddings=True),
    "capped": lambda: make("gemma2"),
    "adapted_head": lambda: adapted(make(tie_word_embeddings=False), "lm_head"),
}


@KINDS
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_functional_call_uses_the_given_weights_for_loss_and_logits(
    model: Callable[[], Any], loss: Callable[[Any], Tensor], kind: str
) -> None:
    patched, plain = pair_of(model().train())
    given = others(plain, kind)
    found = []
    exact = {name: p.double() for name, p in given.items()}
    for which, weights in ((patched, given), (plain, given), (twin(plain).double(), exact)):
        leaves = {name: p.detach().requires_grad_(p.requires_grad) for name, p in weights.items()}
        value = loss(torch.func.functional_call(which, leaves, kwargs=tokens()))
        if kind != "constants":
            value.backward()
        found.append({"loss": value.detach()} | {name: p.grad for name, p in leaves.items() if p.grad is not None})
    assert kind == "constants" or len(found[0]) > 20
    assert disagreements(*found) == {} if kind != "constants" else torch.allclose(found[0]["loss"], found[1]["loss"])


@KINDS
def test_logits_of_functional_call_are_an_error_once_the_given_weights_have_changed(patched: Any, kind: str) -> None:
    given = others(patched, kind)
    outputs = torch.func.functional_call(patched, given, kwargs=tokens())
    with torch.no_grad():
        given["lm_head.weight"].mul_(2)
    with pytest.raises(liger_hf.LogitsError, match="has been updated"):
        outputs.logits.argmax(-1)


def test_a_head_that_gets_another_weight_leaves_the_logits_those_of_the_forward_pass(patched: Any) -> None:
    outputs, expected = patched(**tokens()), patched(**tokens()).logits.detach()
    patched.lm_head.weight = nn.Parameter(torch.zeros(VOCABULARY, 64))
    assert torch.equal(outputs.logits.detach(), expected)


def test_gradients_by_torch_func_are_those_of_the_unpatched_model() -> None:
    patched, plain = pair_of(make(tie_word_embeddings=False).train(), only=["linear_cross_entropy"])

    def gradients(model: Any) -> dict[str, Tensor]:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            outputs = torch.func.functional_call(model, weights, kwargs=tokens())
            return outputs.loss + 0.1 * outputs.logits.square().mean()

        return torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})

    assert disagreements(*(gradients(model) for model in (patched, plain, twin(plain).double()))) == {}


def test_logits_can_be_read_after_undo() -> None:
    model, plain = pair()
    outputs = model(**tokens())
    model.liger_report.undo()
    loss = LOSSES["beside_the_loss"](outputs)
    torch.testing.assert_close(outputs.logits.detach(), plain(**tokens()).logits.detach())
    loss.backward()
    expected = results(plain, LOSSES["beside_the_loss"])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_a_model_whose_forward_calls_another_one_keeps_their_heads_apart(patched: Any) -> None:
    teacher = make(tie_word_embeddings=False).train()
    liger_hf.apply(teacher)
    seen: list[Any] = []

    def ask(module: Any, args: Any, output: Any) -> None:
        with torch.no_grad():
            seen.append(teacher(**tokens()))

    patched.model.register_forward_hook(ask)
    outputs = patched(**tokens())
    assert isinstance(outputs.logits, liger_hf.LazyLogits)
    assert isinstance(seen[0].logits, Tensor)


def test_training_and_evaluation_in_two_threads_leave_nothing_behind(patched: Any) -> None:
    expected = step(patched, **tokens())["loss"]
    inside, answered = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def wait(module: Any, args: Any, output: Any) -> None:
        if threading.current_thread() is trainer:
            inside.set()
            assert answered.wait(60)

    def train() -> None:
        found["trained"] = patched(**tokens())

    handle = patched.model.register_forward_hook(wait)
    trainer = threading.Thread(target=train)
    trainer.start()
    assert inside.wait(60)
    # While the other thread is between the layers and the head:
    found["head"] = patched.lm_head(torch.ones(1, 64))
    with torch.no_grad():
        found["evaluated"] = patched(**tokens())
    answered.set()
    trainer.join()
    handle.remove()
    assert isinstance(found["head"], Tensor)
    assert isinstance(found["evaluated"].logits, Tensor)
    assert isinstance(found["trained"].logits, liger_hf.LazyLogits)
    assert torch.equal(found["trained"].loss.detach(), expected)
    assert LAZY.head is None
    assert isinstance(patched.lm_head(torch.ones(1, 64)), Tensor)


def test_a_model_from_a_pickle_says_that_nothing_is_replaced_and_can_be_patched_again(patched: Any) -> None:
    file = io.BytesIO()
    torch.save(patched, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.liger_report.replaced == {}
    assert "a pickled model comes back without Liger; call liger_hf.apply again" in str(loaded.liger_report)
    loaded.liger_report.undo()
    assert isinstance(loaded(**tokens()).logits, Tensor)
    report = liger_hf.apply(loaded)
    assert report.replaced == patched.liger_report.replaced
    assert loaded.liger_report is report
    assert torch.equal(step(loaded, **tokens())["loss"], step(patched, **tokens())["loss"])
