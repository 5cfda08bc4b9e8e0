# SPDX-License-Identifier: Apache-2.0
"""A forward that a rule would rewrite, but whose source cannot be read, is in the report; one that only lacks such
statements is not."""

import functools
import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import liger_hf
from hf.tiny_configs import tiny_config
from hf.tiny_models import OPTIONS, make
from liger_hf.discovery import rules
from liger_hf.inspection import _built
from liger_hf.rebinding import innermost, unwrapped
from liger_hf.source import copy_of, definition_of, rebuilt

pytestmark = pytest.mark.cpu

UNREAD = "could not be read"


def undeclared(forward: Any) -> Any:
    """Decorated without functools.wraps."""

    def decorated(self: Any, *args: Any, **options: Any) -> Any:
        return forward(self, *args, **options)

    return decorated


def without_source(forward: Any) -> Any:
    code = forward.__code__.replace(co_filename="<nowhere>")
    return type(forward)(code, forward.__globals__, "forward", forward.__defaults__)


class Compiled:
    """Like a forward that is not a Python function."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __get__(self, module: Any, kind: Any = None) -> Any:
        return self if module is None else self.forward.__get__(module)


WAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "decorator": (undeclared, "it has a closure, as super() and decorators without functools.wraps make one"),
    "source": (without_source, "it has no source (defined with exec, or edited after import); define it in a .py file"),
    "compiled": (Compiled, "it is not a Python function"),
}


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + y
        return self.norm(x)


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * (1 + scale) + shift


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.act(a) * b


class FunctionalGate(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(a) * b


def rows(model: nn.Module) -> list[tuple[str, str, str, str]]:
    report = liger_hf.inspect(model, verify=False)
    return [(row.module, row.op, row.verdict, row.reason) for row in report.rows if UNREAD in row.reason]


# The model, its class that cannot be read, the op, and what is left.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "residual": (make, "LlamaDecoderLayer", "add_rms_norm", "sums before its norms are left alone"),
    "layer_norm": (lambda: nn.Sequential(Layer(nn.LayerNorm)), "Layer", "add_layer_norm", "sums before its norms are left alone"),
    "rotary_norm": (lambda: make("qwen3"), "Qwen3Attention", "qk_norm_rope", "norms of queries and keys are left alone"),
    "gate": (lambda: nn.Sequential(Gate()), "Gate", "swiglu", "products with an activation are left alone"),
    "function": (lambda: nn.Sequential(FunctionalGate()), "FunctionalGate", "swiglu", "products with an activation are left alone"),
}  # fmt: skip


# The code of a compiled one does not show that it rotates.
CASES = [
    *product(("residual", "gate"), WAYS),
    *product(("layer_norm", "rotary_norm"), ["decorator"]),
    ("function", "source"),
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_forward_that_a_rule_would_rewrite_but_cannot_read_is_one_row(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, kind, op, left = MODELS[name]
    model = build()
    assert rows(model) == []
    cls = next(type(module) for module in model.modules() if type(module).__name__ == kind)
    hide, reason = WAYS[way]
    monkeypatch.setattr(cls, "forward", hide(innermost(unwrapped(cls.forward))))
    assert rows(model) == [(kind, op, "left", f"{kind}.forward {UNREAD}, so {left}: {reason}")]


def test_modulation_that_cannot_be_read_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Modulated, "forward", undeclared(Modulated.forward))
    ops = {op: reason for _, op, _, reason in rows(nn.Sequential(Modulated()))}
    assert "so norms that it scales and shifts are left alone" in ops["modulated_layer_norm"]


def test_adapters_that_read_the_same_input_in_a_forward_that_cannot_be_read_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make(), peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"]))
    attention = type(model.base_model.model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", undeclared(attention.forward))
    notes = liger_hf.apply(model, only=["lora_linear"], verify=False).notes
    words = "so its linear layers with adapters read the same input one after the other"
    expected = f"LlamaAttention.forward {UNREAD}, {words}: {WAYS['decorator'][1]}."
    assert [note for note in notes if UNREAD in note] == [expected]


def test_a_row_about_such_a_forward_is_not_asked_for_with_other_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setattr(type(model.model.layers[0]), "forward", undeclared(type(model.model.layers[0]).forward))
    assert UNREAD not in str(liger_hf.inspect(model, only=["swiglu"], verify=False))


@pytest.mark.parametrize("kind", [Layer, Modulated, Gate, FunctionalGate], ids=lambda kind: kind.__name__)
def test_a_decorated_forward_is_read(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "forward", functools.wraps(kind.forward)(undeclared(kind.forward)))
    model = nn.Sequential(kind(nn.LayerNorm) if kind is Layer else kind())
    assert rows(model) == []
    assert liger_hf.inspect(model, verify=False).replaceable != {}


class Looked(nn.Embedding):
    """A norm within a forward that calls super(), which is not a sum."""

    def __init__(self) -> None:
        super().__init__(10, 16)
        self.norm = nn.RMSNorm(16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(ids))


def relu(self: nn.Module, x: Any) -> Any:
    return torch.relu(x)


def test_a_rebuilt_forward_is_read_after_an_equal_one_is_gone() -> None:
    first, second = (rebuilt(relu, copy_of(relu), {"torch": torch}) for _ in range(2))
    assert first.__code__ == second.__code__
    del first
    gc.collect()
    assert definition_of(second) is not None


def test_a_forward_that_cannot_be_read_but_has_no_sum_in_its_code_gives_no_row() -> None:
    assert rows(nn.Sequential(Looked())) == []


@pytest.mark.parametrize(
    "model_type", [*OPTIONS, "bamba", "bart", "bert", "bloom", "gpt_oss", "llama4_text", "qwen3_5_text", "t5"]
)
def test_every_forward_of_a_model_is_read(model_type: str) -> None:
    with torch.device("meta"):
        model = _built(tiny_config(model_type), None)
    found = [rule.look(module) for module in model.modules() for rule in rules()]
    assert [each.refusal for each in found if each is not None and UNREAD in (each.refusal or "")] == []
