# SPDX-License-Identifier: Apache-2.0
"""A gated MLP lets its backward pass write over gate and up only if nothing else can read them."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import forks
import liger_hf
from hf.tiny_models import twin
from liger_hf.rules.gated_mlp import ownership
from liger_hf.rules.gated_mlp import rule as gated_mlp
from liger_hf.rules.gated_mlp.ownership import unshared

pytestmark = pytest.mark.cpu


class Recycled(torch.autograd.Function):
    """SwiGLU whose gradients lie where gate and up were, if it may: past the version counters, as a kernel writes them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, overwrite: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.overwrite = overwrite
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        wide = gate.float() if gate.dtype != torch.float64 else gate
        slope = wide.sigmoid()
        gradients = (grad * up * slope * (1 + wide * (1 - slope))).to(gate.dtype), (grad * wide * slope).to(gate.dtype)
        if not ctx.overwrite:
            return *gradients, None
        WRITTEN.append(gate)
        return *(old.detach().copy_(new) for old, new in zip((gate.data, up.data), gradients, strict=True)), None


WRITTEN: list[Tensor] = []


class Swiglu:
    """The op with that backward pass on every backend."""

    name = "swiglu"

    def __call__(self, gate: Tensor, up: Tensor | None = None, *, overwrite: bool = False) -> Tensor:
        return Recycled.apply(*(gate.chunk(2, -1) if up is None else (gate, up)), overwrite)


@pytest.fixture(autouse=True)
def recycling(monkeypatch: pytest.MonkeyPatch) -> None:
    WRITTEN.clear()
    monkeypatch.setattr(gated_mlp, "ACTIVATIONS", ((Swiglu(), {}),))


Then = Callable[["Projection", Tensor], Tensor]


class Projection(nn.Module):
    """A Linear and what is done with its output."""

    in_features, out_features = 8, 16

    def __init__(self, then: Then) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(8, 16), then
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x))


def keep(value: Callable[[Tensor], Tensor]) -> Then:
    def then(self: Projection, y: Tensor) -> Tensor:
        self.kept.append(value(y))
        return y

    return then


def keep_what_it_views(self: Projection, y: Tensor) -> Tensor:
    y = y * 1
    self.kept.append(y)
    return y.view(3, 2, 16)


# What a projection does, and whether somebody can read its output afterwards.
PRIVATE: dict[str, Then] = {
    "linear": lambda self, y: y,
    "scaled": lambda self, y: y * 2,
    "added": lambda self, y: y + self.linear.weight[:, 0],
    "gelu": lambda self, y: F.gelu(y),
    "dropout": lambda self, y: F.dropout(y, 0.0),
    "norm": lambda self, y: F.layer_norm(y, (16,)),
    "view": lambda self, y: (y * 1).view(3, 2, 16).view(2, 3, 16),
}
SHARED: dict[str, Then] = {
    "tanh": lambda self, y: y.tanh(),
    "sqrt": lambda self, y: (y.abs() + 1).sqrt(),
    "tanh_seen_otherwise": lambda self, y: y.tanh().view(6, 16).view(2, 3, 16),
    "kept": keep(lambda y: y),
    "kept_detached": keep(lambda y: y.detach()),
    "kept_row": keep(lambda y: y[0]),
    "kept_penalty": keep(lambda y: y.square().mean()),
    "kept_as_an_array": keep(lambda y: y.detach().numpy()),  # type: ignore[arg-type, return-value]
    "kept_what_it_views": keep_what_it_views,
}


class Unit(nn.Module):
    def __init__(self, then: Then) -> None:
        super().__init__()
        self.gate, self.up, self.down = Projection(then), Projection(then), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def gradients(unit: Unit, x: Tensor) -> dict[str, Any]:
    """Also of what the projections have kept, read after the unit's backward pass."""
    unit.zero_grad()
    leaf = x.clone().requires_grad_()
    unit(leaf).square().sum().backward(retain_graph=False)
    found: dict[str, Any] = {"x": leaf.grad, **{name: p.grad for name, p in unit.named_parameters()}}
    return found | {"kept": [torch.as_tensor(value).detach() for value in (*unit.gate.kept, *unit.up.kept)]}


@pytest.mark.parametrize("name", [*PRIVATE, *SHARED])
def test_gradients_are_right_and_gate_and_up_are_overwritten_only_where_nothing_reads_them(name: str) -> None:
    then = (PRIVATE | SHARED)[name]
    plain = Unit(then)
    patched = twin(plain)
    assert liger_hf.apply(nn.Sequential(patched)).replaced == {"swiglu": 1}
    WRITTEN.clear()
    x = torch.randn(2, 3, 8) if then is not keep_what_it_views else torch.randn(3, 2, 8)
    expected, got = gradients(plain, x), gradients(patched, x)
    torch.testing.assert_close(got, expected)
    assert len(WRITTEN) == (name in PRIVATE)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_the_output_of_a_linear_is_unshared(shape: tuple[int, ...], bias: bool, autocast: bool) -> None:
    linear, x = nn.Linear(8, 16, bias=bias), torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert unshared((linear(x), linear(x)))
        held = linear(x)
        assert not unshared((linear(x), held))
        with torch.no_grad():
            assert not unshared((linear(x),))


def test_one_tensor_as_gate_and_up_is_shared() -> None:
    linear = nn.Linear(8, 16)
    parts = (linear(torch.randn(3, 8)),) * 2
    assert not unshared(parts)


def test_the_output_of_an_adapter_is_unshared() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 16)), peft.LoraConfig(r=2, target_modules=["0"]))
    assert unshared((model(torch.randn(2, 3, 8)),))


def distinguishes_held_tensors_from_fresh_ones() -> bool:
    x = torch.ones(3, requires_grad=True)
    held = x * 2
    return unshared((x * 2,)) and not unshared((held,))


def test_what_holds_a_tensor_under_one_dispatch_mode_is_not_expected_under_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mode of make_fx holds what is made under it; a plan that came after it predicted that gate and up are not
    overwritten."""
    monkeypatch.setattr(ownership, "_fresh", {})

    def doubled(x: Tensor) -> Tensor:
        unshared((x * 2,))
        return x

    make_fx(doubled, tracing_mode="fake")(torch.ones(3, requires_grad=True))
    with FakeTensorMode():
        assert distinguishes_held_tensors_from_fresh_ones()
    assert distinguishes_held_tensors_from_fresh_ones()


def test_what_a_function_mode_holds_is_not_expected_of_a_fresh_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_fresh", {})

    class Keeps(TorchFunctionMode):
        kept: ClassVar[list[Any]] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.kept.append(function(*args, **(kwargs or {})))
            return self.kept[-1]

    x = torch.ones(3, requires_grad=True)
    with Keeps():
        assert not unshared((x * 2,))
    assert distinguishes_held_tensors_from_fresh_ones()


def test_nothing_is_unshared_under_a_transform() -> None:
    seen = []

    def total(x: Tensor) -> Tensor:
        seen.append(unshared((x * 2,)))
        return x.sum()

    torch.func.grad(total)(torch.ones(3))
    torch.func.vmap(total)(torch.ones(2, 3))
    assert seen == [False, False]


# Each state changes what holds the variables and arguments of Python code that runs meanwhile. The last one never ends.
WATCHED = """
import sys
from contextlib import contextmanager, nullcontext

import torch
from liger_hf.rules.gated_mlp import ownership

def debugger(frame, event, argument):
    frame.f_locals
    return debugger

@contextmanager
def traced():
    sys.settrace(debugger)
    yield
    sys.settrace(None)

@contextmanager
def profiled():
    sys.setprofile(debugger)
    yield
    sys.setprofile(None)

def fails(x):
    raise ValueError

@contextmanager
def after_a_failed_compilation():
    try:
        torch.compile(fails, backend="eager", fullgraph=True)(torch.ones(1))
    except torch._dynamo.exc.Unsupported:
        pass
    yield

states = {"plain": nullcontext, "traced": traced, "profiled": profiled, "failed compilation": after_a_failed_compilation}

x = torch.ones(3, requires_grad=True)
for first, enter in states.items():
    ownership._fresh.clear()
    with enter():
        ownership.unshared((x * 2,))
    for then, enter in states.items():
        with enter():
            fresh = ownership.unshared((x * 2,))
            held = x * 2
            shared = ownership.unshared((held,))
        if not fresh or shared:
            print(f"{first}, then {then}: fresh {fresh}, held {shared}")
"""


def test_what_runs_the_code_does_not_change_who_holds_a_tensor() -> None:
    """A failed compilation leaves a frame evaluator behind, under which callers hold the arguments of a call, too."""
    found = forks.run(WATCHED)
    assert (found.returncode, found.stdout) == (0, ""), found.stderr
