# SPDX-License-Identifier: Apache-2.0
"""A replacement that is wrong is refused, whatever it gets wrong; mistakes of the caller get a clear error."""

import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import liger_hf
from hf.sweep import build
from hf.tiny_models import assert_same_step, make, outcome, pair, pair_of, rows_of, tokens, twin
from liger_core import BackendError, LigerError, OptionError, rms_norm
from liger_core.accuracy import judge
from liger_hf.discovery import replaceable_ops
from liger_hf.rules.gated_mlp import rule as gated_mlp
from liger_hf.rules.head import causal_loss
from liger_hf.rules.norm import rule as norm
from liger_hf.rules.residual import rule as residual
from liger_hf.rules.rotary import forms
from liger_hf.verification import NO_OP

pytestmark = pytest.mark.cpu


class OffBy(torch.autograd.Function):
    """The identity, with a gradient that is wrong by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.factor, None


class Wrong:
    """An op of which the output, or only the gradient of its first argument, is off by a factor."""

    def __init__(self, op: Any, *, output: float = 1.0, gradient: float = 1.0) -> None:
        self.op, self.output, self.gradient, self.name = op, output, gradient, op.name

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> Any:
        result = self.op(OffBy.apply(x, self.gradient), *args, **options)
        return tuple(r * self.output for r in result) if isinstance(result, tuple) else result * self.output


# The ops that apply replaces in a Llama, and where the rules take them from.
OPS = {"rms_norm": norm, "add_rms_norm": residual, "swiglu": None, "rope": forms, "linear_cross_entropy": causal_loss}


def plant(monkeypatch: pytest.MonkeyPatch, op: str, **wrong: float) -> None:
    """Make the rules use an op that is off by a factor."""
    if op == "swiglu":
        activations = tuple((Wrong(o, **wrong), options) for o, options in gated_mlp.ACTIVATIONS)
        monkeypatch.setattr(gated_mlp, "ACTIVATIONS", activations)
    else:
        monkeypatch.setattr(OPS[op], op, Wrong(getattr(OPS[op], op), **wrong))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"output": 1.01}, {"gradient": 1.01}], ids=["output", "gradient"])
@pytest.mark.parametrize("op", OPS)
def test_an_error_of_one_percent_is_refused(op: str, wrong: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, op, **wrong)
    report = liger_hf.apply(make())
    assert report.replaced.keys() == {*OPS} - {op}
    row = rows_of(report, op)[0]
    assert row.verdict == "left"
    assert "relative error" in row.reason
    assert ("gradient of" in row.reason) or "output" in wrong


def test_without_verification_a_wrong_gradient_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "rms_norm", gradient=1.01)
    report = liger_hf.apply(make(), only=["rms_norm"], verify=False)
    assert report.replaced == {"rms_norm": 5}
    assert all(row.reason.startswith("not verified") for row in report.rows if row.verdict == "replaced")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_without_verification_the_same_options_are_found(architecture: str) -> None:
    def found(verify: bool) -> set[tuple[str, str]]:
        rows = liger_hf.apply(make(architecture), verify=verify).rows
        return {(row.pattern, row.reason.partition("agree" if verify else "verified")[2]) for row in rows}

    assert found(verify=False) == found(verify=True)


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class HalfNorm(nn.Module):
    """A norm in everything but its formula."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.formula(x)


LOOKALIKES: dict[str, Callable[[Tensor], Tensor]] = {
    "l2": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6),
    "eps_outside": lambda x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 0.01),
    "detached": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).detach(),
    "clipped": lambda x: normed(x).clamp(-2, 2),
}


@pytest.mark.parametrize("formula", LOOKALIKES.values(), ids=LOOKALIKES.keys())
def test_a_module_that_looks_like_a_norm_but_is_none_is_left(formula: Callable[[Tensor], Tensor]) -> None:
    report = liger_hf.apply(nn.Sequential(HalfNorm(formula)))
    assert report.replaced == {}
    assert NO_OP in report.rows[0].reason


Between = Callable[["Unit", Tensor, Tensor], Tensor]


class Unit(nn.Module):
    """A gated MLP, with something done to what goes into its last projection."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24)
        self.dropout, self.act = nn.Dropout(0.1), nn.SiLU()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, self.act(self.gate(x)), self.up(x)))


UNITS: dict[str, tuple[Between, bool]] = {
    "dropout_before": (lambda unit, gate, up: unit.dropout(gate * up), True),
    "dropout_of_one_factor": (lambda unit, gate, up: unit.dropout(gate) * up, False),
    "dropout_unused": (lambda unit, gate, up: gate * up, False),
    "dropout_as_a_function": (lambda unit, gate, up: unit.dropout(nn.functional.dropout(gate * up, 0.5, unit.training)), False),
    "limited": (lambda unit, gate, up: unit.dropout(gate * up.clamp(-7, 7)), False),
}  # fmt: skip


class Packed(nn.Module):
    """A gated MLP with a norm before its packed projection, up first, and one dropout at two places, as in Phi-4
    multimodal's audio tower."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.norm, self.gate_up, self.down = nn.LayerNorm(24), nn.Linear(24, 80), nn.Linear(40, 24)
        self.act, self.dropout, self.twice = nn.SiLU(), nn.Dropout(0.1), twice

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        y = self.down(self.dropout(up * self.act(gate)))
        return self.dropout(y) if self.twice else y


@pytest.mark.parametrize("twice", [False, True], ids=["dropout_once", "dropout_twice"])
def test_norms_and_dropouts_of_a_gated_mlp_are_called_where_its_own_forward_calls_them(twice: bool) -> None:
    patched, plain = pair_of(Packed(twice), only=["swiglu"])
    assert patched.liger_report.replaced == {"swiglu": 1}

    x, results = torch.linspace(-2, 2, 5 * 24, dtype=torch.float64).view(5, 24).sin(), []
    for module in (patched, plain):
        torch.manual_seed(4)
        results.append(outcome(module.double(), x))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


Step = Callable[["Odd", Tensor], Tensor]


class Odd(nn.Module):
    """A gated MLP whose forward does something odd to the rows or the output, with a child."""

    def __init__(self, child: nn.Module, before: Step, after: Step) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24, bias=False)
        self.act, self.child, self.before, self.after = nn.SiLU(), child, before, after
        self.gate_multiplier, self.down_multiplier = 1.0, 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self, x)
        return self.after(self, self.down(self.act(self.gate(x)) * self.up(x)))


def same(unit: Odd, x: Tensor) -> Tensor:
    return x


def by_child(unit: Odd, x: Tensor) -> Tensor:
    return unit.child(x)


ODD: dict[str, tuple[Odd, str]] = {
    "norm_in_training_only": (Odd(nn.LayerNorm(24), lambda unit, x: unit.child(x) if unit.training else x, same), "its forward calls child 1 times in training, 0 times in evaluation"),
    "norm_of_long_inputs_only": (Odd(nn.LayerNorm(24), by_child, lambda unit, y: unit.child(y) if y.shape[1] > 64 else y), "length 300"),
    "norm_of_one_token_only": (Odd(nn.LayerNorm(24), by_child, lambda unit, y: unit.child(y) if y.shape[1] == 1 else y), "length 1,"),
    "norm_of_columns": (Odd(nn.BatchNorm1d(24), lambda unit, x: unit.child(x.transpose(1, 2)).transpose(1, 2), same), "child must get one row per row of its input (2, 9, 24), it gets (2, 24, 9)"),
    "factor_after_a_norm": (Odd(nn.LayerNorm(24), same, lambda unit, y: unit.child(y) * unit.down_multiplier), NO_OP),
    "random_function": (Odd(nn.LayerNorm(24), lambda unit, x: unit.child(nn.functional.dropout(x, 0.5, unit.training)), same), "float64 run gives another result"),
    "unused": (Odd(nn.LayerNorm(24), same, same), "its forward does not call child, which may be for other calls"),
}  # fmt: skip


@pytest.mark.parametrize(("unit", "reason"), ODD.values(), ids=ODD)
def test_a_gated_mlp_whose_forward_calls_a_child_in_some_calls_or_of_another_shape_is_left(
    unit: Odd, reason: str
) -> None:
    (row,) = rows_of(liger_hf.apply(nn.Sequential(unit), only=["swiglu"]), "swiglu")
    assert row.verdict == "left"
    assert reason in row.reason


class Multiplied(Odd):
    """As Falcon-H1: the gate and what down returns are scaled."""

    def __init__(self, gate: float, down: float) -> None:
        super().__init__(nn.Identity(), same, same)
        self.gate_multiplier, self.down_multiplier = gate, down

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * self.act(self.gate(x) * self.gate_multiplier)
        return self.down(y) * self.down_multiplier


@pytest.mark.slow
@pytest.mark.parametrize("down", [0.1, 0.25, 0.5, 0.75, 1.0, 2.0])
@pytest.mark.parametrize("gate", [0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0])
def test_whether_a_gated_mlp_is_replaced_does_not_depend_on_the_numbers_that_scale_it(gate: float, down: float) -> None:
    assert liger_hf.apply(nn.Sequential(Multiplied(gate, down)), only=["swiglu"]).replaced == {"swiglu": 1}


def test_the_reason_is_that_of_the_candidate_that_came_closest() -> None:
    class Twice(Multiplied):
        """Not what the op computes of more than 64 tokens."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if x.shape[1] <= 64 else 2.0)

    (row,) = rows_of(liger_hf.apply(nn.Sequential(Twice(0.5, 0.25))), "swiglu")
    assert row.reason.startswith(
        f"{NO_OP}. Closest: swiglu (scaled by gate_multiplier and down_multiplier). Its output is off (float32, length "
        "300): relative error "
    )
    assert re.search(r", allowed [\d.e-]+$", row.reason)
    assert row.details.startswith("float32, length 300, output: relative error ")
    assert row.details.count(", original ") == 2


def test_the_reason_names_the_figure_that_exceeds_its_limit() -> None:
    exact, wrong = torch.ones(10_000), torch.ones(10_000)
    wrong[0] += 1e-4
    assert re.match(r"largest 0\.0001 .*, relative error 1e-06 ", judge(wrong, exact, exact) or "")
    wrong[0] += 1.0
    assert re.match(r"relative error 0\.01 .*, largest 1 ", judge(wrong, exact, exact) or "")


def test_a_dropout_that_is_called_in_training_only_is_called_in_training() -> None:
    plain = Odd(nn.Dropout(0.5), same, lambda unit, y: (unit.child(y) if unit.training else y) * unit.down_multiplier)
    patched = twin(plain)
    assert liger_hf.apply(patched, only=["swiglu"]).replaced == {"swiglu": 1}
    x = torch.linspace(-1, 1, 7 * 24).view(7, 24)
    for training in (True, False):
        results = []
        for module in (plain, patched):
            torch.manual_seed(3)
            results.append(module.train(training)(x))
        torch.testing.assert_close(results[1], results[0])


def test_hooks_on_the_norm_and_the_dropout_of_a_replaced_gated_mlp_run_in_its_order() -> None:
    unit = Packed(twice=True)
    assert liger_hf.apply(unit, only=["swiglu"]).replaced == {"swiglu": 1}
    seen: list[str] = []
    for name in ("norm", "dropout", "gate_up", "down"):
        unit.get_submodule(name).register_forward_hook(lambda child, given, y, name=name: seen.append(name))
    unit(torch.ones(3, 24))
    assert seen == ["norm", "gate_up", "dropout", "down", "dropout"]


def test_an_activation_that_depends_on_the_whole_row_is_the_reason_for_leaving_a_gated_mlp() -> None:
    def above_average(unit: Unit, gate: Tensor, up: Tensor) -> Tensor:
        return unit.dropout((gate - gate.mean(-1, keepdim=True)).relu() * up)

    (row,) = rows_of(liger_hf.apply(nn.Sequential(Unit(above_average))), "swiglu")
    why = "one gate changes what becomes of the others in its row"
    assert row.reason == f"what happens between its projections is not elementwise: {why}"


def fading(kind: Any) -> Any:
    """A module of this class whose output is smaller in evaluation."""

    class Fading(kind):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y if self.training else y * 0.9

    return Fading


class FadingSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0).square() * (1.0 if self.training else 0.9)


FADING: dict[str, Callable[[], nn.Module]] = {
    "rms_norm": lambda: fading(HalfNorm)(normed),
    "swiglu": lambda: Unit(lambda unit, gate, up: unit.dropout(gate * up * (1.0 if unit.training else 0.9))),
    "embedding": lambda: fading(nn.Embedding)(9, 8),
    "group_norm": lambda: fading(nn.GroupNorm)(2, 8),
    "relu_squared": lambda: FadingSquare(),
}


@pytest.mark.parametrize("op", FADING)
def test_a_module_that_does_something_else_in_evaluation_is_left(op: str) -> None:
    (row,) = rows_of(liger_hf.apply(nn.Sequential(FADING[op]()), only=[op]), op)
    assert row.verdict == "left"
    assert "in evaluation" in row.reason


def test_experts_that_do_something_else_in_evaluation_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral")
    kind = next(type(module) for module in model.modules() if hasattr(type(module), "_apply_gate"))
    original = kind.forward
    # `wraps` lets the rule read the arguments.
    forward = wraps(original)(lambda self, *args: original(self, *args) * (1.0 if self.training else 0.9))
    monkeypatch.setattr(kind, "forward", forward)
    (row,) = rows_of(liger_hf.apply(model, only=["experts"]), "experts")
    assert row.verdict == "left"
    assert "in evaluation" in row.reason


# Where modules distinguish short inputs from long ones, and one token from several.
TURNS = pytest.mark.parametrize(
    "long", [lambda t: t == 1, lambda t: t > 32, lambda t: t > 256], ids=["one_token", "beyond_32", "beyond_256"]
)


class Summed(nn.Module):
    """A layer that norms a sum."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.tanh()
        y = self.norm(x)
        return y * 2


Long = Callable[[int], bool]
TURNING: dict[str, Callable[[Long], nn.Module]] = {
    "norm": lambda long: HalfNorm(lambda x: normed(x) * (1.1 if long(x.shape[1]) else 1)),
    "gated_mlp": lambda long: Unit(
        lambda unit, gate, up: unit.dropout(gate * up * (1.1 if long(gate.shape[1]) else 1))
    ),
    "layer": lambda long: Summed(HalfNorm(lambda x: normed(x) * (1.1 if long(x.shape[1]) else 1))),
}


@TURNS
@pytest.mark.parametrize("kind", TURNING)
def test_a_module_that_does_something_else_with_another_length_is_left(kind: str, long: Long) -> None:
    report = liger_hf.apply(nn.Sequential(TURNING[kind](long)))
    assert report.replaced == {}
    assert any("length" in row.reason for row in report.rows)


@TURNS
def test_experts_that_do_something_else_with_another_number_of_tokens_are_left(
    long: Long, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("mixtral")
    kind = next(type(module) for module in model.modules() if hasattr(type(module), "_apply_gate"))
    original = kind._apply_gate
    monkeypatch.setattr(kind, "_apply_gate", lambda self, x: original(self, x) * (1.1 if long(x.shape[0]) else 1))
    report = liger_hf.apply(model, only=["swiglu"])
    assert report.replaced == {}
    assert any("length" in row.reason for row in report.rows)


@TURNS
def test_a_rotary_function_that_does_something_else_with_another_length_is_left(
    long: Long, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = modeling_llama.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return original(q, k, cos * 1.1 if long(cos.shape[1]) else cos, sin, unsqueeze_dim=unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    (row,) = rows_of(liger_hf.apply(make()), "rope")
    assert row.verdict == "left"
    assert "length" in row.reason


def test_a_head_that_does_something_else_with_another_length_keeps_its_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        logits, loss = self.lm_head(self.model(input_ids=input_ids).last_hidden_state), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
            loss = loss + logits.float().logsumexp(-1).square().mean() if input_ids.shape[1] > 32 else loss
        return modeling_llama.CausalLMOutputWithPast(loss=loss, logits=logits)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", forward)
    patched, plain = pair()
    for length in (32, 33):
        assert_same_step(patched, plain, **tokens(length=length))


LIMITS: dict[str, tuple[Between, bool]] = {
    "both": (lambda unit, gate, up: nn.functional.silu(gate.clamp(max=7)) * up.clamp(-7, 7), True),
    "up_alone": (lambda unit, gate, up: nn.functional.silu(gate) * up.clamp(-7, 7), False),
    "up_from_above": (lambda unit, gate, up: nn.functional.silu(gate.clamp(max=7)) * up.clamp(max=7), False),
    "gate_on_both_sides": (lambda unit, gate, up: nn.functional.silu(gate.clamp(-7, 7)) * up.clamp(-7, 7), False),
    "another_limit": (lambda unit, gate, up: nn.functional.silu(gate.clamp(max=6)) * up.clamp(-7, 7), False),
    "no_gradient_at_the_limit": (lambda unit, gate, up: nn.functional.silu(gate.clamp(max=7)) * (up - (up - up.clamp(-7, 7)).detach()), False),
    "a_slope": (lambda unit, gate, up: gate.clamp(max=7) * (1.7 * gate.clamp(max=7)).sigmoid() * (up.clamp(-7, 7) + 1), False),
}  # fmt: skip


@pytest.mark.parametrize(("between", "fits"), LIMITS.values(), ids=LIMITS.keys())
def test_a_limited_unit_is_replaced_only_if_its_limits_are_those_of_the_module(between: Between, fits: bool) -> None:
    unit = Unit(between)
    unit.dropout, unit.act, unit.swiglu_limit = nn.Identity(), nn.Identity(), 7.0
    report = liger_hf.apply(nn.Sequential(unit))
    assert report.replaced == ({"swiglu": 1} if fits else {})


@pytest.mark.parametrize(("between", "fits"), UNITS.values(), ids=UNITS.keys())
def test_a_gated_mlp_is_replaced_only_if_all_of_it_is_computed(between: Between, fits: bool) -> None:
    # Evaluation: a dropout must be noticed although it does nothing yet.
    report = liger_hf.apply(nn.Sequential(Unit(between)).eval())
    assert report.replaced == ({"swiglu": 1} if fits else {})


def clamped(unit: Any, gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    limit = unit.limits[0] if limit is None else limit
    return unit.dropout(gate * up.clamp(-limit, limit))


def clamped_to(limit: float) -> Between:
    return lambda unit, gate, up: clamped(unit, gate, up, limit)


def of_a_missing_variable(limit: float) -> Between:
    def function(unit: Any, gate: Tensor, up: Tensor) -> Tensor:
        return clamped(unit, gate, up, limit) if unit.limits else missing

    if limit < 0:
        missing = gate  # noqa: F821
    return function


def unit_with(between: Between = clamped, **attributes: Any) -> Unit:
    unit = Unit(between)
    for name, value in attributes.items():
        setattr(unit, name, value)
    return unit


# Pairs of units of one class, of which only the first computes a swiglu.
INF = float("inf")
DIFFERENT: dict[str, tuple[Unit, Unit]] = {
    "settings": (unit_with(limits=[INF]), unit_with(limits=[5.0])),
    "functions": (Unit(lambda unit, gate, up: unit.dropout(gate * up)), Unit(lambda unit, gate, up: unit.dropout(gate * up.sin()))),
    "variables_of_functions": (Unit(clamped_to(INF)), Unit(clamped_to(5.0))),
    "functions_of_a_missing_variable": (unit_with(of_a_missing_variable(INF), limits=[0]), unit_with(of_a_missing_variable(5.0), limits=[0])),
    "partial_functions": (Unit(partial(clamped, limit=INF)), Unit(partial(clamped, limit=5.0))),
    "children_of_children": (unit_with(clamped_to(INF), act=nn.Sequential(nn.SiLU())), unit_with(clamped_to(INF), act=nn.Sequential(nn.Tanh()))),
}  # fmt: skip


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize("units", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_units_of_one_class_that_differ_are_checked_one_by_one(units: tuple[Unit, Unit], order: int) -> None:
    verdicts = {row.pattern: row.verdict for row in liger_hf.apply(nn.Sequential(*map(twin, units[::order]))).rows}
    assert verdicts == dict(zip("01", ["replaced", "left"][::order], strict=True))


def test_a_module_that_does_something_else_in_float64_is_left() -> None:
    norm = HalfNorm(lambda x: x if x.dtype == torch.float64 else nn.functional.rms_norm(x, (32,)))
    (row,) = liger_hf.apply(nn.Sequential(norm)).rows
    assert row.reason == "it could not be checked, since its float64 run gives another result (float32, output)"


def test_a_norm_of_mixed_dtypes_keeps_the_dtype_of_the_plain_module() -> None:
    plain = make("qwen3").model.layers[0].self_attn.q_norm
    patched = twin(plain)
    liger_hf.apply(nn.Sequential(patched))
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    assert patched(x).dtype == plain(x).dtype == torch.float32
    assert torch.equal(patched(x), plain(x))


@pytest.mark.parametrize("activation", ["relu", "quick_gelu", "tanh"])
def test_a_gate_that_no_op_computes_is_left(activation: str) -> None:
    report = liger_hf.apply(make(hidden_act=activation), only=["swiglu", "geglu"])
    assert report.replaced == {}
    assert [row.reason.startswith(NO_OP) for row in rows_of(report, "swiglu")] == [True]


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_the_activation_decides_the_op(activation: str) -> None:
    patched, plain = pair(hidden_act=activation)
    assert patched.liger_report.replaced["geglu"] == 2
    assert_same_step(patched, plain)


MISTAKES: dict[str, tuple[Callable[[], Any], type[LigerError], str]] = {
    "no_model": (lambda: liger_hf.apply({"a": 1}), liger_hf.ModelError, "liger_hf.apply: model must be a torch.nn.Module, got dict"),  # type: ignore[arg-type]
    "no_model_to_inspect": (lambda: liger_hf.inspect(None), liger_hf.ModelError, "liger_hf.inspect: model must be a torch.nn.Module, got NoneType"),  # type: ignore[arg-type]
    "unknown_op": (lambda: liger_hf.apply(make(), only=["rms_nrom"]), OptionError, f"liger_hf.apply: only must name ops among {', '.join(replaceable_ops())}, got 'rms_nrom'. Did you mean 'rms_norm'?"),
    "one_name": (lambda: liger_hf.apply(make(), exclude="rope"), OptionError, "liger_hf.apply: exclude must be an iterable of ops, got 'rope'; write exclude=['rope']"),
    "cross_entropy": (lambda: liger_hf.apply(make(), only=["cross_entropy"]), OptionError, "liger_hf.apply: only must name ops that are put into models, cross_entropy comes with linear_cross_entropy"),
    "no_head": (lambda: liger_hf.apply(make().model, only=["linear_cross_entropy"]), liger_hf.ModelError, "liger_hf.apply: only= must name something that LlamaModel has, it has none of it: linear_cross_entropy: no module is a model with an output head"),
    "no_group_norm": (lambda: liger_hf.apply(make(), only=["group_norm"]), liger_hf.ModelError, "liger_hf.apply: only= must name something that LlamaForCausalLM has, it has none of it: group_norm: rms_norm fits instead"),
    "auto_option": (lambda: liger_hf.AutoLigerModelForCausalLM.from_config(None, liger={"onyl": []}), OptionError, "AutoLigerModelForCausalLM: liger must be a mapping with keys among only, exclude, verify, got ['onyl']"),
    "auto_option_outside": (lambda: liger_hf.AutoLigerModelForCausalLM.from_config(None, only=["rope"]), OptionError, "AutoLigerModelForCausalLM: only must be given in liger=, write liger={'only': ['rope']}"),
    "auto_call": (liger_hf.AutoLigerModelForCausalLM, OptionError, "AutoLigerModelForCausalLM: a model must be made with from_pretrained or from_config, got a call of the class"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_raises_a_clear_error(call: Callable[[], Any], error: type[LigerError], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


def test_a_backend_that_cannot_run_here_is_an_error_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise BackendError("rms_norm: backend 'other' runs on cuda tensors, got a cpu tensor")

    monkeypatch.setattr(norm, "rms_norm", Wrong(rms_norm))
    monkeypatch.setattr(Wrong, "__call__", refuse)
    model = make()
    with pytest.raises(BackendError, match="runs on cuda tensors"):
        liger_hf.apply(model)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []
