# SPDX-License-Identifier: Apache-2.0
"""A residual is added and normed in one step, where a layer's forward says so and nobody stands between."""

import functools
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils.deprecation import deprecate_kwarg

import liger_hf
from hf.tiny_models import (
    LAYERS,
    assert_same_step,
    checkpoint_layers,
    make,
    outcome,
    pair,
    pair_of,
    recorded,
    rows_of,
    step,
    step_disagreements,
    tokens,
    twin,
)
from liger_hf.rules.residual import rule as residual
from liger_hf.rules.residual.source import norms_of_sums, with_one_call

# Whole models on the device under test are in test_architectures.
pytestmark = pytest.mark.cpu

OFFSETS = {"llama": 0, "gemma": 1, "gemma2": 1, "phi3": 0, "granite": 0}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for every call in which a patched layer adds and norms in one step."""
    return recorded(monkeypatch, residual, "_fit", after=lambda fits, *args: fits or None)


def applied(model: nn.Module, calls: list[Any], **options: Any) -> liger_hf.Report:
    report = liger_hf.apply(model, **options)
    calls.clear()
    return report


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "offset"), OFFSETS.items(), ids=OFFSETS)
def test_every_layer_adds_and_norms_in_one_step_and_trains_like_the_unpatched_model(
    architecture: str, offset: int, calls: Any
) -> None:
    patched, plain = pair(architecture)
    calls.clear()
    (row,) = rows_of(patched.liger_report, "add_rms_norm")
    assert (row.pattern, row.count, row.verdict) == ("model.layers.*", LAYERS, "replaced")
    assert f"weight_offset={offset}" in row.reason
    assert step_disagreements(patched, plain) == {}
    assert len(calls) == LAYERS


# Modules, and calls of the op: the sum in BERT's embeddings broadcasts the positions.
LAYER_NORMS = {"starcoder2": (2, 2, ""), "nemotron": (2, 2, "weight + 1"), "persimmon": (2, 2, ""), "bert": (5, 4, "")}


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "found"), LAYER_NORMS.items(), ids=LAYER_NORMS)
def test_layer_norms_are_added_and_normed_in_one_step_too(
    architecture: str, found: tuple[int, int, str], calls: Any
) -> None:
    modules, sums, detail = found
    plain = make(architecture, **({"is_decoder": True} if architecture == "bert" else {})).eval()
    patched = twin(plain)
    report = applied(patched, calls)
    rows = rows_of(report, "add_layer_norm")
    assert (sum(row.count for row in rows), {row.verdict for row in rows}) == (modules, {"replaced"})
    assert all(row.reason == f"outputs and gradients agree{', ' * bool(detail)}{detail}" for row in rows)
    wrong = step_disagreements(patched, plain)
    # A softmax does not depend on a bias of the keys: its gradient is rounding alone.
    assert [name for name in wrong if not name.endswith("key.bias")] == []
    assert len(calls) == sums
    report.undo()
    assert_same_step(patched, plain, rtol=0, atol=0)


def test_under_autocast_a_layer_norm_is_called_as_the_module_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    patched, plain = pair_of(make("starcoder2").eval(), only=["add_layer_norm"])
    monkeypatch.setattr(residual, "add_layer_norm", lambda *args: pytest.fail("added and normed in one step"))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(patched(**tokens()).logits, plain(**tokens()).logits)


def test_dropout_on_the_branch_draws_the_numbers_of_the_unpatched_model(calls: Any) -> None:
    patched, plain = pair("phi3", resid_pdrop=0.3)
    calls.clear()
    losses = []
    for model in (plain, patched):
        torch.manual_seed(3)
        losses.append(step(model, **tokens())["loss"])
    torch.testing.assert_close(losses[1], losses[0])
    assert len(calls) == LAYERS


@pytest.mark.parametrize("before", [False, True], ids=["after_apply", "before_apply"])
def test_layers_that_get_another_class_are_replaced_and_checkpointed(before: bool, calls: Any) -> None:
    plain = make().train()
    patched = twin(plain)
    if not before:
        applied(patched, calls)
    for layer in patched.model.layers:
        # As FSDP2 and parametrizations leave it.
        layer.__class__ = type(f"Sharded{type(layer).__name__}", (type(layer),), {})
    if before:
        assert not any("replaced on the class" in note for note in applied(patched, calls).notes)
    checkpoint_layers(patched)
    assert step_disagreements(patched, plain) == {}
    assert len(calls) == 2 * LAYERS


@pytest.mark.slow
def test_a_compiled_layer_runs_the_hooks_on_its_norm() -> None:
    model, inputs = make(num_hidden_layers=1).eval(), tokens()
    liger_hf.apply(model)
    # A hook that is added after compilation is not seen in an unpatched model either (torch's
    # skip_nnmodule_hook_guards).
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda module, args, output: output * 2)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(**inputs).logits, model(**inputs).logits)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def wrap_the_forward(norm: Any) -> None:
    forward = norm.forward
    norm.forward = lambda x: 2 * forward(x)


def give_another_class(norm: Any) -> None:
    norm.__class__ = type("Other", (type(norm),), {"forward": lambda self, x: 2 * x})
    norm.__dict__.pop("forward", None)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "wrap_the_module": lambda layer: setattr(
        layer, "post_attention_layernorm", Doubled(layer.post_attention_layernorm)
    ),
    "wrap_the_forward": lambda layer: wrap_the_forward(layer.post_attention_layernorm),
    "give_it_another_class": lambda layer: give_another_class(layer.post_attention_layernorm),
    "widen_its_weight": lambda layer: layer.post_attention_layernorm.double(),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_norm_that_is_another_after_apply_is_called_as_it_is(change: str, calls: Any) -> None:
    patched, plain = pair()
    calls.clear()
    for model in (plain, patched):
        CHANGES[change](model.model.layers[0])
        if change == "widen_its_weight":
            # What a weight in float64 makes float64.
            model.model.layers[0].mlp.double().register_forward_hook(lambda module, args, output: output.float())
    assert_same_step(patched, plain, atol=1e-5)
    assert len(calls) == LAYERS - 1


def test_a_parametrised_weight_is_the_one_that_counts() -> None:
    patched, plain = pair()
    for model in (plain, patched):
        norm = model.model.layers[0].post_attention_layernorm
        nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    assert_same_step(patched, plain, atol=1e-5)


def test_a_hook_that_is_there_when_apply_comes_is_a_reason() -> None:
    model = make()
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *args: None)
    rows = rows_of(liger_hf.apply(model), "add_rms_norm")
    assert [(row.count, row.verdict, row.reason) for row in rows] == [
        (1, "left", "post_attention_layernorm: the norm has hooks, which the fused op would skip"),
        (1, "replaced", "outputs and gradients agree, weight_offset=0, cast='input'"),
    ]


def test_a_sum_in_other_statements_is_answered_with_the_two_forms_that_are_replaced() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(8)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.norm((a + b).float())

    words = "no forward has the statements `x = a + b; y = self.norm(x)` or `y = self.norm(a + b)`, with an RMSNorm"
    with pytest.raises(liger_hf.ModelError, match=re.escape(words)):
        liger_hf.apply(Apart(), only=["add_rms_norm"])


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = Norm(), Norm()
        self.linear = nn.Linear(8, 8)

    def work(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        return 3 * function(*args, **options)

    return wrapper


def halving(factor: float) -> Any:
    """A decorator with an option, which changes what it passes on."""

    def decorator(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(self: Any, x: Tensor, **options: Any) -> Any:
            return function(self, factor * x, **options)

        return wrapper

    return decorator


def hidden(function: Any) -> Any:
    """A decorator whose closure does not have the function."""
    functions = [function]

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        return 3 * functions[0](*args, **options)

    return wrapper


class Forwards(Layer):
    """Forwards that add and norm; what they compute depends on all that they assign."""

    def normed_under_the_name_of_the_sum(self, x: Tensor) -> Tensor:
        residual = x
        x = self.work(x)
        x = residual + x
        residual = x
        x = self.norm(x)
        return residual - 2 * self.work(x)

    def normed_under_a_name_of_its_own(self, x: Tensor) -> Tensor:
        x = x + self.work(x)
        y = self.norm(x)
        return x - 2 * self.work(y)

    def sum_that_nobody_keeps(self, x: Tensor) -> Tensor:
        x = self.work(x) + x
        x = self.norm(x)
        return self.work(x)

    def sum_of_several_names(self, x: Tensor, factor: float = 3.0, *, shift: float = 0.5) -> Tensor:
        """A text
        of two lines."""
        x = 2 * x + factor * self.work(x) * self.linear.weight[0]
        first = x
        second = x
        x = self.norm(x)
        return first - second * x + shift

    def twice(self, x: Tensor) -> Tensor:
        if x.dim() > 1:
            y = x + self.work(x)
            x = y
            y = self.norm(y)
        else:
            y = x
        for _ in range(2):
            x = x + y
            y = self.second(x)
        return x * y

    def sum_in_the_call(self, x: Tensor) -> Tensor:
        y = self.norm(self.work(x) + x)
        x = self.second(x + y)
        return x * y

    def keyword_of_the_norm(self, x: Tensor) -> Tensor:
        x = x + self.work(x)
        y = self.norm(x=x)
        return x * y

    def something_between(self, x: Tensor) -> Tensor:
        x = x + self.work(x)
        x = x * 2
        return x * self.norm(x)

    def in_place(self, x: Tensor) -> Tensor:
        x = 1 * x
        x += self.linear.bias
        y = self.norm(x)
        return x * y

    def copy_is_lost(self, x: Tensor) -> Tensor:
        x = x + self.work(x)
        y = x
        y = self.norm(x)
        return x * y

    def difference(self, x: Tensor) -> Tensor:
        x = x - self.work(x)
        y = self.norm(x)
        return x * y

    @halving(0.5)
    @decorated
    def decorated_twice(self, x: Tensor) -> Tensor:
        x = x + self.work(x)
        y = self.norm(x)
        return x * y

    @deprecate_kwarg("hidden", version="99.0.0", new_name="x")
    def decorated_by_transformers(self, x: Tensor) -> Tensor:
        x = x + self.work(x)
        y = self.norm(x)
        return x * y

    @hidden
    def decorated_from_a_list(self, x: Tensor) -> Tensor:
        x = x + self.work(x)
        y = self.norm(x)
        return x * y

    def calls_its_base(self, x: Tensor) -> Tensor:
        x = x + super().work(x)
        y = self.norm(x)
        return x * y


@functools.cache
def layer_with(forward: Any) -> type[nn.Module]:
    """The class of a layer with this forward."""
    return type(forward.__name__, (Forwards,), {"forward": forward})


# How many norms after sums a forward has, where it is not one.
NONE = "keyword_of_the_norm something_between in_place copy_is_lost difference decorated_from_a_list calls_its_base"
NORMS = {"twice": 3, "sum_in_the_call": 2} | dict.fromkeys(NONE.split(), 0)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [forward for forward in vars(Forwards).values() if callable(forward)])
def test_a_forward_keeps_its_meaning(forward: Any, calls: Any) -> None:
    count = NORMS.get(forward.__name__, 1)
    layer, x = layer_with(forward)().double(), torch.randn(5, 8, dtype=torch.float64)
    expected = outcome(layer, x)
    report = applied(layer, calls, exclude=["rms_norm"])
    assert ("add_rms_norm" in report.replaced) == (count > 0)
    torch.testing.assert_close(outcome(layer, x), expected)
    assert len(calls) == count
    report.undo()
    torch.testing.assert_close(outcome(layer, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("other", [torch.ones(8), torch.ones(5, 8, dtype=torch.float32)], ids=["broadcast", "promoted"])
def test_a_sum_of_unlike_tensors_stays_a_sum(other: Tensor, calls: Any) -> None:
    layer, x = layer_with(Forwards.normed_under_a_name_of_its_own)().double(), torch.randn(5, 8, dtype=torch.float64)
    layer.work = lambda x: other * 2  # type: ignore[method-assign]
    expected = layer(x)
    applied(layer, calls)
    torch.testing.assert_close(layer(x), expected)
    assert calls == []


@pytest.mark.parametrize("transposed", ["left", "right"])
def test_results_are_laid_out_like_those_of_the_plain_layer(transposed: str, calls: Any) -> None:
    layer, seen = layer_with(Forwards.normed_under_the_name_of_the_sum)(), []
    x, branch = torch.randn(4, 5, 8), torch.ones(5, 4, 8).transpose(0, 1)
    if transposed == "left":
        x, branch = x.transpose(0, 1).contiguous().transpose(0, 1), branch.contiguous()
    layer.work = lambda x: seen.append(x.stride()) or branch.clone()  # type: ignore[method-assign]
    expected = layer(x).stride()
    applied(layer, calls)
    assert layer(x).stride() == expected
    assert len(calls) == 1
    assert seen[:2] == seen[2:]


def test_the_new_forward_says_where_it_was_written() -> None:
    original = Forwards.sum_of_several_names
    made = with_one_call(original, ("norm",), lambda norm, a, b: (norm(a + b), a + b))
    assert made.__code__.co_filename == original.__code__.co_filename
    assert made.__code__.co_firstlineno == original.__code__.co_firstlineno
    names = ("__defaults__", "__kwdefaults__", "__doc__")
    assert [getattr(made, name) for name in names] == [getattr(original, name) for name in names]
    assert made.__globals__ is original.__globals__


def test_a_source_that_is_not_that_of_the_code_is_not_believed() -> None:
    original = Forwards.normed_under_a_name_of_its_own
    assert norms_of_sums(original) == ("norm",)
    code = Forwards.difference.__code__.replace(co_firstlineno=original.__code__.co_firstlineno)
    assert norms_of_sums(FunctionType(code, globals())) == ()


def test_code_without_source_is_left() -> None:
    space: dict[str, Any] = {}
    exec("def forward(self, x):\n    x = x + 1\n    y = self.norm(x)\n    return y", space)
    assert norms_of_sums(space["forward"]) == ()
    assert norms_of_sums(functools.partial(space["forward"])) == ()
    assert norms_of_sums(torch.tanh) == ()


def test_norms_of_two_classes_in_one_layer_are_left() -> None:
    class Another(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    layer = layer_with(Forwards.twice)()
    layer.second = Another()
    (row,) = rows_of(liger_hf.apply(layer), "add_rms_norm")
    assert row.reason == "the norms after its sums must be of one class, norm, second are not"


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary_of_one(q, cos, sin), apply_rotary_of_one(k, cos, sin)


def apply_rotary_of_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


class Rotating(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = apply_rotary(x, self.work(x), cos, sin)
        x = q + k
        y = self.norm(x)
        return x * y


def test_a_forward_that_has_another_op_already_keeps_that() -> None:
    layer = Rotating()
    tables = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    x = torch.randn(2, 4, 3, 8)
    expected = layer(x, *tables)
    report = liger_hf.apply(layer)
    verdicts = {row.op: row.verdict for row in report.rows}
    assert verdicts == {"rope": "replaced", "add_rms_norm": "left", "rms_norm": "replaced"}
    assert "what it would replace is already replaced for rope" in str(report)
    torch.testing.assert_close(layer(x, *tables), expected)
