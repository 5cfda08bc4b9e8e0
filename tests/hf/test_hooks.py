# SPDX-License-Identifier: Apache-2.0
"""Hooks see and change in a patched model what they do in the plain one, whenever they were registered."""

import copy
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import tree_leaves, tree_map

import liger_hf
from hf.sweep import build
from hf.tiny_models import adapted, make, pair, patched_twin, rows_of, step, tokens, twin

pytestmark = [pytest.mark.slow, pytest.mark.cpu]

# One module of each kind.
MODULES = {
    "model": "",
    "base_model": "model",
    "embedding": "model.embed_tokens",
    "rotary_embedding": "model.rotary_emb",
    "layer": "model.layers.0",
    "norm_before_attention": "model.layers.0.input_layernorm",
    "norm_of_a_sum": "model.layers.0.post_attention_layernorm",
    "last_norm": "model.norm",
    "attention": "model.layers.0.self_attn",
    "query": "model.layers.0.self_attn.q_proj",
    "norm_of_queries": "model.layers.0.self_attn.q_norm",
    "norm_of_keys": "model.layers.0.self_attn.k_norm",
    "unit": "model.layers.0.mlp",
    "gate": "model.layers.0.mlp.gate_proj",
    "up": "model.layers.0.mlp.up_proj",
    "down": "model.layers.0.mlp.down_proj",
    "activation": "model.layers.0.mlp.act_fn",
    "head": "lm_head",
}


def values(value: Any) -> list[Tensor]:
    """The tensors that a hook sees, copied; lazy logits are read."""
    return [leaf.detach().clone() for leaf in tree_leaves(value) if isinstance(leaf, (Tensor, liger_hf.LazyLogits))]


def changed(value: Any) -> Any:
    """The same with other values, as hooks may return them."""

    def other(leaf: Any) -> Any:
        floating = isinstance(leaf, liger_hf.LazyLogits) or (isinstance(leaf, Tensor) and leaf.is_floating_point())
        return leaf * 1.25 if floating else leaf

    return tree_map(other, value)


Seen = list[tuple[str, list[Tensor]]]


class Watch(NamedTuple):
    """How a hook is registered, and what it returns to change something; it gets what it is called with."""

    register: Callable[..., Any]
    change: Callable[..., Any]
    on_all: Callable[..., Any]
    options: dict[str, Any]


WATCHES = {
    "forward_pre": Watch(
        nn.Module.register_forward_pre_hook,
        lambda args, kwargs: (changed(args), kwargs),
        global_hooks.register_module_forward_pre_hook,
        {"with_kwargs": True},
    ),
    "forward": Watch(
        nn.Module.register_forward_hook,
        lambda args, kwargs, output: changed(output),
        global_hooks.register_module_forward_hook,
        {"with_kwargs": True, "always_call": True},
    ),
    "backward_pre": Watch(
        nn.Module.register_full_backward_pre_hook, changed, global_hooks.register_module_full_backward_pre_hook, {}
    ),
    "backward": Watch(
        nn.Module.register_full_backward_hook,
        lambda inputs, outputs: changed(inputs),
        global_hooks.register_module_full_backward_hook,
        {},
    ),
}
EACH_WATCH = pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)


@pytest.fixture(scope="module")
def plain() -> Any:
    return make("qwen3", num_hidden_layers=1).train()


@pytest.fixture(scope="module")
def patched(plain: Any) -> Any:
    return patched_twin(plain)


def watched_step(
    model: Any, watch: Watch, path: str | None, change: bool = False, apply: bool = False
) -> tuple[Seen, dict[str, Tensor]]:
    """What a hook on a module of a copy, or on all, sees in one training step, and the results of the step. apply:
    after the hook came."""
    copied, seen = twin(model), []
    names = {module: name for name, module in copied.named_modules()}

    def hook(module: nn.Module, *what: Any) -> Any:
        keywords = [sorted(each) for each in what if isinstance(each, dict)]
        seen.append((f"{names.get(module)} {keywords}", values(what)))
        return watch.change(*what) if change else None

    handle = watch.on_all(hook) if path is None else watch.register(copied.get_submodule(path), hook, **watch.options)
    try:
        if apply:
            liger_hf.apply(copied, verify=not change)
            assert seen == [], "apply called the hook"
        return seen, step(copied, **tokens())
    finally:
        handle.remove()


def assert_same(got: tuple[Seen, dict[str, Tensor]], expected: tuple[Seen, dict[str, Tensor]]) -> None:
    (seen, results), (wanted, wanted_results) = got, expected
    assert [what for what, _ in seen] == [what for what, _ in wanted]
    for (_, each), (_, other) in zip(seen, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results, wanted_results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", ["hook", "liger"])
@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES.keys())
@EACH_WATCH
@pytest.mark.parametrize("change", [False, True], ids=["sees", "changes"])
def test_a_hook_sees_and_changes_what_it_does_in_the_unpatched_model(
    plain: Any, patched: Any, path: str, watch: Watch, change: bool, first: str
) -> None:
    hook_first = first == "hook"
    got = watched_step(plain if hook_first else patched, watch, path, change, apply=hook_first)
    assert_same(got, watched_step(plain, watch, path, change))


@pytest.mark.parametrize("first", ["hook", "liger"])
@EACH_WATCH
def test_a_hook_on_all_modules_sees_what_it_does_in_the_unpatched_model(
    plain: Any, patched: Any, watch: Watch, first: str
) -> None:
    got = watched_step(plain if first == "hook" else patched, watch, None, apply=first == "hook")
    assert_same(got, watched_step(plain, watch, None))


@pytest.mark.parametrize("write", [operator.imul, operator.isub])
@pytest.mark.parametrize("enabled", [True, False], ids=["with_gradients", "without_gradients"])
def test_a_hook_on_the_head_writes_to_what_it_does_in_the_unpatched_model(
    plain: Any, patched: Any, write: Callable[[Any, Tensor], Any], enabled: bool
) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        with torch.set_grad_enabled(enabled):
            write(output, 1 + torch.arange(output.shape[-1]) / 100)

    results = []
    for model in map(twin, (plain, patched)):
        model.lm_head.register_forward_hook(hook)
        results.append(step(model, **tokens()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_logits_that_a_hook_makes_and_keeps_are_those_of_the_forward_pass(plain: Any, patched: Any) -> None:
    """The logit lens: the head is called on the hidden states of a layer."""
    plain, patched = twin(plain), twin(patched)
    kept: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(model.lm_head(model.model.norm(output)))

    for model in (plain, patched):
        model.model.layers[0].register_forward_hook(hook)
        step(model, **tokens())
    torch.testing.assert_close(kept[1] + 0, kept[0])
    del kept[:]
    step(patched, **tokens())
    torch.optim.SGD(patched.parameters(), lr=0.1).step()
    with pytest.raises(liger_hf.LogitsError, match="has been updated since the forward pass"):
        kept[0].argmax(-1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another_module": lambda owner: setattr(owner, "act_fn", nn.ReLU()),
    "another_forward": lambda owner: setattr(owner.act_fn, "forward", nn.functional.relu),
    "hook_that_ablates": lambda owner: owner.act_fn.register_forward_hook(lambda _, args, y: y * (y.detach() > 0.1)),
}
# The op that computes the activation of a type.
OF_ACTIVATION = {"llama": "swiglu", "mixtral": "experts"}


def owner_of_activation(model: nn.Module) -> str:
    return next(
        name for name, module in model.named_modules() if isinstance(getattr(module, "act_fn", None), nn.Module)
    )


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", OF_ACTIVATION)
def test_what_becomes_of_the_activation_counts(kind: str, change: Callable[[Any], None]) -> None:
    plain = build(kind).train()
    patched = twin(plain)
    inputs = tokens()
    unchanged = step(plain, **inputs)
    path = owner_of_activation(plain)
    assert liger_hf.apply(patched).replaced[OF_ACTIVATION[kind]] > 1
    for model in (plain, patched):
        change(model.get_submodule(path))
    expected = step(plain, **inputs)
    assert not torch.isclose(expected["loss"], unchanged["loss"], rtol=1e-5)
    torch.testing.assert_close(step(patched, **inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["another_forward", "hook_that_ablates"])
@pytest.mark.parametrize("kind", OF_ACTIVATION)
def test_a_watched_activation_when_apply_comes_is_a_reason(kind: str, change: str) -> None:
    model = build(kind)
    CHANGES[change](model.get_submodule(owner_of_activation(model)))
    rows = rows_of(liger_hf.apply(model), OF_ACTIVATION[kind])
    assert "the fused op would skip act_fn, which has a hook or its own forward; remove it before `apply`" in {
        row.reason for row in rows if row.verdict == "left"
    }
    assert [row.verdict for row in rows].count("replaced") == 1


class Unit(nn.Module):
    """A gated MLP whose activation is a module, or a function of its own."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_a_function_that_takes_the_place_of_the_activation_counts() -> None:
    unit = Unit(nn.functional.silu)
    model, x = nn.Sequential(unit), torch.randn(3, 8)
    assert liger_hf.apply(model).replaced == {"swiglu": 1}
    unit.act = nn.functional.relu
    torch.testing.assert_close(model(x), Unit.forward(unit, x))
    copied = twin(model)
    torch.testing.assert_close(copied(x), model(x))


class Scaled(Unit):
    """A gated MLP with settings that do nothing as they are."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.strength, self.ablated, self.words = 1.0, False, None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.ablated else super().forward(x) * self.factor()

    def factor(self) -> float:
        return self.strength if self.words is None else 2.0


class ScaledNorm(nn.RMSNorm):
    """A norm with a setting that does nothing as it is."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)
        self.strength = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.strength


SETTINGS: dict[str, tuple[Callable[[], Any], str, str, Any]] = {
    "number_of_an_mlp": (Scaled, "swiglu", "strength", 0.5),
    "flag_of_an_mlp": (Scaled, "swiglu", "ablated", True),
    "words_of_an_mlp": (Scaled, "swiglu", "words", "twice"),
    "number_of_a_norm": (lambda: ScaledNorm(8), "rms_norm", "strength", 2.0),
}


@pytest.mark.parametrize(("make_one", "op", "name", "value"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_that_changes_after_apply_counts(make_one: Callable[[], Any], op: str, name: str, value: Any) -> None:
    module, x = make_one(), torch.randn(3, 8)
    model = nn.Sequential(module)
    assert liger_hf.apply(model).replaced == {op: 1}
    before = model(x)
    setattr(module, name, value)
    assert not torch.allclose(model(x), before)
    assert torch.equal(model(x), type(module).forward(module, x))


def test_a_setting_of_a_norm_after_a_sum_that_changes_after_apply_counts() -> None:
    plain = make(num_hidden_layers=1)
    plain.model.layers[0].post_attention_layernorm = ScaledNorm(64)
    patched = patched_twin(plain)
    assert patched.liger_report.replaced["add_rms_norm"] == 1
    for model in (plain, patched):
        model.model.layers[0].post_attention_layernorm.strength = 2.0
    torch.testing.assert_close(step(patched, **tokens()), step(plain, **tokens()), rtol=1e-4, atol=1e-5)


def test_the_eps_of_a_norm_is_read_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = nn.RMSNorm(8, eps=1e-6), torch.randn(3, 8)
    model = nn.Sequential(norm)
    liger_hf.apply(model)
    norm.eps = 1.0
    expected = nn.RMSNorm.forward(norm, x)
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda *args: pytest.fail("its own forward ran"))
    torch.testing.assert_close(model(x), expected)


def test_units_of_one_class_whose_activations_differ_are_checked_one_by_one() -> None:
    report = liger_hf.apply(nn.Sequential(Unit(nn.GELU("tanh")), Unit(nn.GELU())))
    assert [row.reason.partition("agree")[2] for row in report.rows] == [", approximate='tanh'", ", approximate='none'"]


def test_apply_binds_a_shallow_copy_to_its_own_weights() -> None:
    norm, x = nn.RMSNorm(8, eps=1e-6), torch.randn(3, 8)
    liger_hf.apply(norm)
    copied = copy.copy(norm)
    copied._parameters = {"weight": nn.Parameter(torch.full((8,), 2.0))}
    report = liger_hf.apply(copied)
    assert report.replaced == {"rms_norm": 1}
    torch.testing.assert_close(copied(x), 2 * norm(x))
    report.undo()
    torch.testing.assert_close(norm(x), nn.RMSNorm.forward(norm, x))


# Where apply replaces a forward.
REPLACED = ("", "model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp", "model.norm", "lm_head")


def of_another_class(module: nn.Module, forward: bool = True) -> None:
    """Change the class of a module to one that reads a setting; or to one with the same forward, as FSDP2 does."""
    kind: Any = type(module)

    def scaled(self: Any, *args: Any, **options: Any) -> Any:
        output = kind.forward(self, *args, **options)
        return tree_map(lambda leaf: leaf * self.scale if isinstance(leaf, Tensor) else leaf, output)

    module.__class__ = type(f"Other{kind.__name__}", (kind,), {"forward": scaled} if forward else {})
    module.scale = 1.5


@pytest.mark.parametrize("path", [*REPLACED, "model.layers.0.mlp.act_fn"], ids=lambda path: path or "model")
def test_a_class_that_changes_after_apply_counts(path: str) -> None:
    patched, plain = pair(tie_word_embeddings=False)
    for model in (plain, patched):
        of_another_class(model.get_submodule(path))
    torch.testing.assert_close(step(patched, **tokens()), step(plain, **tokens()), rtol=1e-4, atol=1e-5)


# Not the head, whose class others have, too.
@pytest.mark.parametrize("path", REPLACED[:-1], ids=lambda path: path or "model")
def test_a_class_with_the_same_forward_keeps_what_apply_did(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(num_hidden_layers=1, tie_word_embeddings=False).train()
    liger_hf.apply(model)
    module: Any = model.get_submodule(path)
    monkeypatch.setattr(type(module), "forward", lambda *args, **options: pytest.fail("its own forward ran"))
    of_another_class(module, forward=False)
    model(**tokens()).loss.backward()


def doubled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


@pytest.mark.parametrize(
    "path", ["lm_head", "base_model.model.lm_head.lora_A.default"], ids=["offloaded_head", "adapted_head"]
)
def test_a_hook_on_a_head_that_is_computed_in_chunks_runs_once(path: str) -> None:
    plain = make(tie_word_embeddings=False).train()
    plain = adapted(plain, "lm_head") if path != "lm_head" else plain.requires_grad_(False)
    patched = twin(plain)
    calls: list[Any] = []
    for model in (plain, patched):
        model.get_submodule(path).register_forward_pre_hook(doubled)
        model.get_submodule(path).register_forward_hook(lambda module, args, output: calls.append(output.shape))
    if path == "lm_head":
        # The embeddings need a gradient, or nothing does.
        for model in (plain, patched):
            model.enable_input_require_grads()
        cpu_offload(patched.lm_head, execution_device=torch.device("cpu"))
    liger_hf.apply(patched)
    results = []
    for model in (plain, patched):
        outputs = model(**tokens())
        outputs.loss.backward()
        results.append((outputs.loss.detach(), outputs.logits + 0))
    torch.testing.assert_close(*results)
    assert calls == [(2, 11, 300 if path == "lm_head" else 4)] * 2
