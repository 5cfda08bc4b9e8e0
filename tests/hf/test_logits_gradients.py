# SPDX-License-Identifier: Apache-2.0
"""However lazy logits are read, what is computed from them afterwards has the gradients of the unpatched model."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import liger_hf
from hf.tiny_models import VOCABULARY, disagreements, gradients_of, make, patched_twin, tokens, twin

pytestmark = pytest.mark.cpu

TARGET = torch.arange(22) % 9


def without_gradients(look: Callable[[Any], Any], mode: Any = torch.no_grad) -> Callable[[Any], Any]:
    def looked(outputs: Any) -> Any:
        with mode():
            return look(outputs)

    return looked


LOOKS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda outputs: None,
    "argmax": lambda outputs: outputs.logits.argmax(-1),
    "accuracy_without_gradients": without_gradients(lambda outputs: (outputs.logits.argmax(-1).flatten() == TARGET).float().mean()),
    "accuracy_in_inference_mode": without_gradients(lambda outputs: (outputs.logits.argmax(-1).flatten() == TARGET).float().mean(), torch.inference_mode),
    "cross_entropy_without_gradients": without_gradients(lambda outputs: F.cross_entropy(outputs.logits.flatten(0, 1), TARGET)),
    "materialize_without_gradients": without_gradients(lambda outputs: getattr(outputs.logits, "materialize", lambda: None)()),
    "detach": lambda outputs: outputs.logits.detach(),
    "deepcopy_of_lazy_logits": lambda outputs: (copy.deepcopy(outputs.logits) if isinstance(outputs.logits, liger_hf.LazyLogits) else None),
    "pickle": lambda outputs: pickle.dumps(outputs.logits),
    "no_gradients_then_gradients": lambda outputs: (LOOKS["accuracy_without_gradients"](outputs), outputs.logits.sum()),
}  # fmt: skip

LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "beside_the_loss": lambda outputs: outputs.loss + 0.1 * outputs.logits.float().logsumexp(-1).square().mean(),
    "alone": lambda outputs: outputs.logits.float().logsumexp(-1).square().mean(),
    "of_a_slice": lambda outputs: outputs.loss + outputs.logits[:, 1:].tanh().square().mean(),
    "cross_entropy": lambda outputs: F.cross_entropy(outputs.logits.flatten(0, 1), TARGET),
    "smoothed_cross_entropy": lambda outputs: F.cross_entropy(
        outputs.logits.view(-1, VOCABULARY), TARGET, label_smoothing=0.1
    ),
    "of_two_reads": lambda outputs: outputs.logits.square().mean() + torch.softmax(outputs.logits, -1)[..., 3].sum(),
}


def results(model: Any, loss_of: Callable[[Any], Tensor], **inputs: Any) -> dict[str, Tensor]:
    """The loss that is computed from the outputs, and the gradient of every parameter."""
    model.zero_grad()
    loss = loss_of(model(**(inputs or tokens())))
    loss.backward()
    return {"loss": loss.detach(), **gradients_of(model)}


@pytest.fixture(scope="module", params=["llama-tied", "llama-untied", "gemma2-tied"])
def models(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A patched and an unpatched model, and the unpatched one in float64."""
    architecture, tied = request.param.split("-")
    plain = make(architecture, tie_word_embeddings=tied == "tied").train()
    patched = patched_twin(plain, only=["linear_cross_entropy"])
    return patched, plain, twin(plain).double()


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_a_look_at_the_logits_takes_no_gradient_from_a_later_loss(
    models: tuple[Any, Any, Any], look: Callable[[Any], Any], loss: Callable[[Any], Tensor]
) -> None:
    def looked_at(outputs: Any) -> Tensor:
        look(outputs)
        return loss(outputs)

    assert disagreements(*(results(model, looked_at) for model in models)) == {}


# What plain logits would make a constant of, and what they would not: a cast to the dtype that they have returns them.
DERIVATIONS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda z: z[:, 1:],
    "view": lambda z: z.view(-1, VOCABULARY),
    "reshape": lambda z: z.reshape(11, 2, VOCABULARY),
    "flatten": lambda z: z.flatten(0, 1),
    "cast": lambda z: z.to(torch.float16).float(),
    "same_dtype": lambda z: z.to(z.dtype),
    "contiguous": lambda z: z.contiguous(),
    "scale": lambda z: z * 0.5,
    "tanh": lambda z: torch.tanh(z),
    "bias": lambda z: z + torch.ones(VOCABULARY),
    "scale_and_cap": lambda z: torch.tanh(z * 0.5) * 4,
    "after_a_look": lambda z: (z.argmax(-1), z * 2)[1],
    "detach": lambda z: z.detach(),
}


@pytest.mark.slow
@pytest.mark.parametrize("derive", DERIVATIONS.values(), ids=DERIVATIONS.keys())
def test_what_is_derived_without_gradients_is_a_constant_where_plain_logits_would_be(
    models: tuple[Any, Any, Any], derive: Callable[[Any], Any]
) -> None:
    def loss(outputs: Any) -> Tensor:
        with torch.no_grad():
            derived = derive(outputs.logits)
        return outputs.loss + 0.1 * (derived * derived).mean() + 0.01 * (derived.float().logsumexp(-1) ** 2).mean()

    assert disagreements(*(results(model, loss) for model in models)) == {}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_logits_of_a_forward_without_gradients_stay_constants(models: tuple[Any, Any, Any], mode: Any) -> None:
    patched, plain, _ = models
    with mode():
        outputs, expected = patched(**tokens(), keep_logits=False), plain(**tokens())
    assert isinstance(outputs.logits, liger_hf.LazyLogits)
    for read in (lambda z: z + 0, lambda z: F.cross_entropy(z.view(-1, VOCABULARY), TARGET)):
        value = read(outputs.logits)
        assert not value.requires_grad
        torch.testing.assert_close(value, read(expected.logits))


def test_a_look_without_gradients_keeps_no_graph(models: tuple[Any, Any, Any]) -> None:
    logits = models[0](**tokens()).logits
    with torch.no_grad():
        values = logits.materialize()
        assert logits.materialize() is values
    assert not values.requires_grad
    real = logits.materialize()
    assert real.requires_grad
    assert torch.equal(real, values)
    with torch.no_grad():
        assert logits.materialize() is real


WATCHES: dict[str, Callable[[Any], Any]] = {
    "retain_grad": lambda outputs: outputs.logits.retain_grad(),
    "register_hook": lambda outputs: outputs.logits.register_hook(print),
    "autograd": lambda outputs: torch.autograd.grad(outputs.loss + outputs.logits.sum(), outputs.logits),
}


@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES.keys())
def test_a_gradient_of_the_logits_without_the_loss_is_refused(
    models: tuple[Any, Any, Any], watch: Callable[[Any], Any]
) -> None:
    message = r"the loss is computed without them, .* call the model without labels"
    with pytest.raises(liger_hf.LogitsError, match=message):
        watch(models[0](**tokens()))


class SquaredMean(torch.autograd.Function):
    """A loss with a backward pass of its own, as those of other packages."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Tensor:
        ctx.factor = 2 * logits.detach() / logits.numel()
        return (logits * logits).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.factor * grad


class CrossEntropy(torch.autograd.Function):
    """One that differentiates in its forward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            (ctx.grad,) = torch.autograd.grad(F.cross_entropy(leaf.flatten(0, 1), TARGET), leaf)
        return F.cross_entropy(logits.flatten(0, 1), TARGET)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.grad * grad


class CrossEntropyOfRows(CrossEntropy):
    """One that reads the logits by nothing but the loss that takes them as they are."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), TARGET)


FUNCTIONS: dict[str, Callable[[Any], Tensor]] = {
    "own": SquaredMean.apply,
    "own_after_a_look": lambda z: (without_gradients(lambda outputs: outputs.argmax(-1))(z), SquaredMean.apply(z))[1],
    "own_of_a_slice": lambda z: SquaredMean.apply(z[:, 1:]),
    "differentiated_at_once": CrossEntropy.apply,
    "cross_entropy_alone": CrossEntropyOfRows.apply,
    "reentrant_checkpoint": lambda z: checkpoint(
        lambda logits: logits.float().logsumexp(-1).square().mean(), z, use_reentrant=True
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_an_autograd_function_that_would_get_no_gradient_is_refused(
    models: tuple[Any, Any, Any], function: Callable[[Any], Tensor]
) -> None:
    message = r"a custom autograd function, .* must be given a tensor, .* call the model with keep_logits=True"
    with pytest.raises(liger_hf.LogitsError, match=message):
        function(models[0](**tokens()).logits)


def test_an_autograd_function_of_kept_logits_gets_the_plain_gradient(models: tuple[Any, Any, Any]) -> None:
    def loss(outputs: Any) -> Tensor:
        return outputs.loss + SquaredMean.apply(outputs.logits)

    patched, plain, exact = models
    kept = results(patched, loss, **tokens(), keep_logits=True)
    assert disagreements(kept, results(plain, loss), results(exact, loss)) == {}


def test_an_autograd_function_whose_logits_need_no_gradient_is_served(models: tuple[Any, Any, Any]) -> None:
    logits = models[0](**tokens()).logits
    with torch.no_grad():
        constant = logits[:, 1:]
    assert torch.equal(SquaredMean.apply(constant), SquaredMean.apply(constant.detach()))


def test_a_model_that_runs_inside_an_autograd_function_is_served(models: tuple[Any, Any, Any]) -> None:
    class Tiled(torch.autograd.Function):
        """Differentiates a whole model in its forward pass, as tiled training steps do."""

        @staticmethod
        def forward(ctx: Any, factor: Tensor, model: Any) -> Tensor:
            with torch.enable_grad():
                outputs = model(**tokens())
                loss = outputs.loss + outputs.logits.float().logsumexp(-1).square().mean()
            loss.backward()
            return loss.detach() * factor

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
            return None, None

    patched, plain, exact = models
    gradients = []
    for model in (patched, plain, exact):
        Tiled.apply(torch.ones((), requires_grad=True), model)
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert disagreements(*gradients) == {}


def test_a_look_under_autocast_changes_no_gradient(models: tuple[Any, Any, Any]) -> None:
    def after_a_look(outputs: Any) -> Tensor:
        LOOKS["accuracy_without_gradients"](outputs)
        return LOSSES["beside_the_loss"](outputs)

    seen = []
    for loss in (after_a_look, LOSSES["beside_the_loss"]):
        # One context each: autocast remembers the weights that it has cast.
        with torch.autocast("cpu", torch.bfloat16):
            seen.append(results(models[0], loss))
    for name, value in seen[1].items():
        assert float((seen[0][name] - value).norm() / value.norm()) < 2e-3, name
