# SPDX-License-Identifier: Apache-2.0
"""Queries and keys are normalized and rotated in one step, where an attention's forward says so and nobody stands
between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_hf
from hf.test_residual import Doubled, Norm, applied, apply_rotary, apply_rotary_of_one
from hf.tiny_models import (
    LAYERS,
    assert_same_step,
    checkpoint_layers,
    make,
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
from liger_hf.rules.rotary_norm import rule
from liger_hf.rules.rotary_norm.source import norms_before_rotary

# Whole models on the device under test are in test_architectures.
pytestmark = [pytest.mark.slow, pytest.mark.cpu]

# Norms in one statement with the projection, of their own, in a branch, before a rotary function in a branch, and one
# function each.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "glm4_moe": {"head_dim": 16, "use_qk_norm": True, "first_k_dense_replace": 2, "moe_intermediate_size": 32},
    "exaone4": {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2},
    "apertus": {},
    "afmoe": {"head_dim": 16, "num_dense_layers": 2, "moe_intermediate_size": 32},
}
OFFSETS = {"gemma3_text": 1}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for every call in which a patched attention normalizes and rotates in one step."""
    return recorded(monkeypatch, rule, "_fit", after=lambda fits, *args: fits or None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_attention_normalizes_and_rotates_in_one_step_and_trains_like_the_unpatched_model(
    architecture: str, calls: Any
) -> None:
    patched, plain = pair(architecture, **ARCHITECTURES[architecture])
    calls.clear()
    assert patched.liger_report.replaced["qk_norm_rope"] == LAYERS
    assert f"weight_offset={OFFSETS.get(architecture, 0)}" in rows_of(patched.liger_report, "qk_norm_rope")[0].reason
    assert step_disagreements(patched, plain) == {}
    # The layers of AFMoE and EXAONE 4 that attend globally do not rotate.
    some = architecture in ("exaone4", "afmoe")
    assert len(calls) == (plain.config.layer_types.count("sliding_attention") if some else LAYERS)


def test_without_rope_there_is_no_qk_norm_rope() -> None:
    report = liger_hf.apply(make("qwen3"), exclude=["rope"])
    assert not {"rope", "qk_norm_rope"} & report.replaced.keys()
    assert {row.reason for row in rows_of(report, "qk_norm_rope")} == {"it includes rope, excluded by exclude="}


def test_rope_alone_is_put_in_where_qk_norm_rope_is_excluded(calls: Any) -> None:
    model, inputs = make("qwen3").train(), tokens()
    report = applied(model, calls, exclude=["qk_norm_rope"])
    step(model, **inputs)
    assert (report.replaced["rope"], report.replaced.get("qk_norm_rope", 0), calls) == (LAYERS, 0, [])


def test_a_compiled_checkpointed_layer_falls_back_neither_for_its_attention_nor_for_its_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = make("qwen3", num_hidden_layers=1).train(), tokens() | {"use_cache": False}
    expected = model(**inputs).loss
    liger_hf.apply(model)
    checkpoint_layers(model)
    fit, untouched = rule._fit, rule.untouched
    monkeypatch.setattr(rule, "_fit", lambda *args: fit(*args) or pytest.fail("normalized before it was rotated"))
    monkeypatch.setattr(rule, "untouched", lambda *args: untouched(*args) or pytest.fail("normalized by the module"))
    monkeypatch.setattr(residual, "_plain", lambda *args: pytest.fail("added and normed one after the other"))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss, expected)


def test_norms_of_two_dtypes_are_left() -> None:
    model = make("qwen3")
    for layer in model.model.layers:
        layer.self_attn.q_norm.double()
    reasons = [row.reason for row in rows_of(liger_hf.apply(model), "qk_norm_rope")]
    assert reasons == ["the norms of queries and keys must be of one class, width, eps and dtype"]


def test_norms_of_another_dtype_than_their_heads_are_called_as_modules(calls: Any) -> None:
    patched, plain = pair_of(make("qwen3", num_hidden_layers=1).eval())
    calls.clear()
    seen: list[Tensor] = []
    x = torch.randn(2, 5, 64)
    for model in (plain, patched):
        attention = model.model.layers[0].self_attn
        for part in (attention.q_norm, attention.k_norm, attention.v_proj, attention.o_proj):
            part.double()
        attention.v_proj.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        cos, sin = model.model.rotary_emb(x, torch.arange(5)[None])
        with torch.no_grad():
            seen.append(attention(x, position_embeddings=(cos.double(), sin.double()), attention_mask=None)[0])
    torch.testing.assert_close(seen[1], seen[0])
    assert calls == []


CHANGES: dict[str, Callable[[Any], Any]] = {
    "wrap_the_module": lambda attention: setattr(attention, "q_norm", Doubled(attention.q_norm)),
    "change_its_eps": lambda attention: setattr(attention.k_norm, "variance_epsilon", 0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_norm_that_is_another_after_apply_is_called_as_it_is(change: Callable[[Any], None], calls: Any) -> None:
    patched, plain = pair("qwen3")
    calls.clear()
    for model in (plain, patched):
        change(model.model.layers[0].self_attn)
    assert_same_step(patched, plain, atol=1e-5)
    assert len(calls) == LAYERS - 1


def test_a_hook_that_is_there_when_apply_comes_is_a_reason() -> None:
    model = make("qwen3")
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *args: None)
    rows = [row for row in liger_hf.apply(model).rows if row.op in ("qk_norm_rope", "rope")]
    assert [(row.op, row.count, row.verdict, row.reason.partition(",")[0]) for row in rows] == [
        ("qk_norm_rope", 1, "left", "q_norm: the norm has hooks"),
        ("rope", 1, "replaced", "outputs and gradients agree"),
        ("qk_norm_rope", 1, "replaced", "outputs and gradients agree"),
        ("rope", 1, "replaced", "within qk_norm_rope"),
    ]


@pytest.mark.parametrize("architecture", ["olmo2", "hunyuan_v1_dense"])
def test_norms_over_all_heads_and_norms_after_the_rotary_function_are_left(architecture: str) -> None:
    report = liger_hf.apply(make(architecture, head_dim=16))
    assert report.replaced["rope"] == LAYERS
    assert rows_of(report, "qk_norm_rope") == []


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = Norm(), Norm()
        self.qkv = nn.Linear(8, 8)
        self.normalizes, self.rotates = True, True


class Fused(Attention):
    """Forwards that are fused."""

    def in_one_statement(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = self.q_norm(self.qkv(x)).transpose(1, 2)
        k = self.k_norm(x).transpose(1, 2)
        q, k = apply_rotary(q, k, cos, sin)
        return q, k

    def keys_first(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        k = x.transpose(1, 2)
        q = self.qkv(x).transpose(1, 2)
        k = self.k_norm(k)
        q = self.q_norm(q)
        values = x * 2
        q, k = apply_rotary(q, k, cos=cos, sin=sin)
        return q, k, values

    def transposed_later(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.qkv(x), x
        q = self.q_norm(q)
        k = self.k_norm(k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        q, k = apply_rotary(q, k, cos, sin)
        return q, k

    def norms_in_a_branch(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.qkv(x), x
        if self.normalizes:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        q, k = apply_rotary(q, k, cos, sin)
        return q, k

    def rotary_in_a_branch(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.q_norm(self.qkv(x)), x
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        if self.rotates:
            q, k = apply_rotary(q, k, cos, sin)
        else:
            q = q * 2
        return q, k

    def one_of_each(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = self.q_norm(self.qkv(x)).transpose(1, 2)
        q = apply_rotary_of_one(q, cos, sin)
        if self.normalizes:
            k = self.k_norm(x)
            k = k.transpose(1, 2)
            k = apply_rotary_of_one(k, cos, sin)
        else:
            k = x
        return q, k

    def one_norm_for_both(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = self.q_norm(self.qkv(x)).transpose(1, 2)
        k = self.q_norm(x).transpose(1, 2)
        q, k = apply_rotary(q, k, cos, sin)
        return q, k


FUSED = [forward for forward in vars(Fused).values() if callable(forward)]


@pytest.mark.parametrize("normalizes", [True, False], ids=["normalizing", "not_normalizing"])
@pytest.mark.parametrize("rotates", [True, False], ids=["rotating", "not_rotating"])
@pytest.mark.parametrize("forward", FUSED)
def test_a_forward_keeps_its_meaning(forward: Any, rotates: bool, normalizes: bool, calls: Any) -> None:
    torch.manual_seed(0)
    plain = type("Own", (Fused,), {"forward": forward})().double()
    patched = twin(plain)
    assert applied(patched, calls, only=["qk_norm_rope"]).replaced == {"qk_norm_rope": 1}
    x, cos, sin = (torch.randn(2, 5, *rest, dtype=torch.float64) for rest in ((3, 8), (8,), (8,)))
    results = []
    for module in (plain, patched):
        module.rotates, module.normalizes = rotates, normalizes
        given = x.clone().requires_grad_()
        outputs = module(given, cos, sin)
        sum(output.square().sum() for output in outputs).backward()
        results.append((outputs, given.grad, {name: p.grad for name, p in module.named_parameters()}))
    torch.testing.assert_close(results[1], results[0])
    branches = {"norms_in_a_branch": normalizes, "rotary_in_a_branch": rotates, "one_of_each": 1 + normalizes}
    assert len(calls) == branches.get(forward.__name__, 1)


class Left(Attention):
    """Forwards in which a statement sees what would be held."""

    def seen_between(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = self.q_norm(self.qkv(x)).transpose(1, 2)
        k = self.k_norm(x).transpose(1, 2)
        kept = q
        q, k = apply_rotary(q, k, cos, sin)
        return q, k, kept

    def one_of_the_other(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = self.q_norm(self.qkv(x)).transpose(1, 2)
        k = self.k_norm(q)
        q, k = apply_rotary(q, k, cos, sin)
        return q, k

    def seen_by_a_function(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = x
        look = lambda: q  # noqa: E731
        q = self.q_norm(self.qkv(x)).transpose(1, 2)
        k = self.k_norm(x).transpose(1, 2)
        kept = look()
        q, k = apply_rotary(q, k, cos, sin)
        return q, k, kept

    def in_a_loop(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        for rotates in (True, False):
            q = self.q_norm(self.qkv(x)).transpose(1, 2)
            k = self.k_norm(x).transpose(1, 2)
            if not rotates:
                break
            q, k = apply_rotary(q, k, cos, sin)
        return q, k

    def scaled(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = self.q_norm(self.qkv(x)).transpose(1, 2) * 2
        k = self.k_norm(x).transpose(1, 2)
        q, k = apply_rotary(q, k, cos, sin)
        return q, k

    def other_names(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = self.q_norm(self.qkv(x)).transpose(1, 2)
        k = self.k_norm(x).transpose(1, 2)
        a, b = apply_rotary(q, k, cos, sin)
        return a, b, q, k

    def in_the_test(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = self.q_norm(self.qkv(x)).transpose(1, 2)
        k = self.k_norm(x).transpose(1, 2)
        if q.sum() > 0:
            q, k = apply_rotary(q, k, cos, sin)
        return q, k

    def half_in_a_branch(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.qkv(x), x
        q = self.q_norm(q).transpose(1, 2)
        if self.normalizes:
            k = self.k_norm(k)
        k = k.transpose(1, 2)
        q, k = apply_rotary(q, k, cos, sin)
        return q, k

    def passes_to_a_loop(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q = self.q_norm(self.qkv(x)).transpose(1, 2)
        k = self.k_norm(x).transpose(1, 2)
        for _ in range(2):
            q, k = apply_rotary(q, k, cos, sin)
        return q, k


@pytest.mark.parametrize("forward", [forward for forward in vars(Left).values() if callable(forward)])
def test_where_a_statement_sees_what_would_be_held_the_forward_is_left(forward: Any) -> None:
    assert norms_before_rotary(forward, "apply_rotary") == []
