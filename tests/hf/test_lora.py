# SPDX-License-Identifier: Apache-2.0
"""Linear layers with adapters of PEFT: what the op computes, what is left to PEFT, and that a model trains as without
Liger."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_hf
from hf import sweep, tiny_models
from hf.test_sweep import SAMPLE
from hf.tiny_models import (
    adapted,
    checkpoint_layers,
    exact_step,
    make,
    outcome,
    pair_of,
    patched_twin,
    random_adapters,
    recorded,
    step,
    step_disagreements,
    tokens,
    twin,
)
from liger_core.accuracy import error
from liger_core.kernels import KERNELS
from liger_hf.rules.gated_mlp import rule as gated_mlp
from liger_hf.rules.lora import rule
from liger_hf.rules.lora import together as joint
from liger_hf.rules.lora.source import with_shared_inputs
from liger_train import checkpointing

peft = pytest.importorskip("peft", reason="needs peft")
hotswap = pytest.importorskip("peft.utils.hotswap", reason="needs the hot swapping of peft")

pytestmark = pytest.mark.slow
# PEFT refuses the projections of Mamba, and fails itself where a linear router returns two tensors.
ADAPTABLE = [name for name in SAMPLE if name not in ("mamba2", "llama4_text")]
ONLY = {"only": ["lora_linear"]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An entry for each layer that the op computes."""
    return recorded(monkeypatch, rule, "_adapted")


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    # Dropout that drops nothing takes the path of dropout, and can be compared.
    "dropout": {"lora_dropout": 1e-9},
    "dora_and_dropout": {"use_dora": True, "lora_dropout": 1e-9},
    "saved_beside": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_get_the_gradients_of_peft(kind: str) -> None:
    patched, plain = pair_of(adapted(make(tie_word_embeddings=False), **KINDS[kind]), **ONLY)
    assert patched.liger_report.replaced == {"lora_linear": 2 if "target_modules" in KINDS[kind] else 14}
    assert step_disagreements(patched, plain) == {}


@pytest.mark.cpu
@pytest.mark.parametrize("model_type", ADAPTABLE)
def test_a_type_with_adapters_computes_what_it_does_without_liger(model_type: str) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    plain = random_adapters(peft.get_peft_model(sweep.build(model_type), config))
    report, inexact, rounded = sweep._compared(plain, sweep._outcomes(plain))
    assert (inexact, rounded) == ([], [])
    assert report.replaced["lora_linear"] > 0


def two_active(model: Any) -> None:
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])


def swappable(model: Any) -> None:
    """As before hot swapping into a compiled model: ranks are padded, and scales become tensors."""
    hotswap.prepare_model_for_compiled_hotswap(model, target_rank=8)


# How the model is adapted, what is done to it before `apply`, and the reason.
LEFT: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "variant": ({"alora_invocation_tokens": [1]}, lambda model: None, "its adapter is a variant of LoRA, ALora"),
    "bias": ({"lora_bias": True}, lambda model: None, "its adapter does not consist of two Linear without bias"),
    "two_active": ({}, two_active, "it has 2 active adapters, and the op computes one"),
    "tensor_scales": ({}, swappable, "its scale is a tensor"),
}


@pytest.mark.parametrize(("options", "prepare", "reason"), LEFT.values(), ids=LEFT)
def test_what_the_op_does_not_compute_is_left_to_peft_with_the_reason(
    options: dict[str, Any], prepare: Callable[[Any], Any], reason: str
) -> None:
    plain = adapted(
        make(tie_word_embeddings=False, attention_bias="lora_bias" in options), target_modules=["q_proj"], **options
    )
    prepare(plain)
    patched = twin(plain)
    (row,) = (row for row in liger_hf.apply(patched).rows if row.op == "lora_linear")
    assert (row.verdict, row.reason.partition(",")[0] if prepare is swappable else row.reason) == ("left", reason)
    assert step_disagreements(patched, plain) == {}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dropout", [0.0, 1e-9], ids=["whole", "dropout"])
def test_dora_beside_a_quantized_layer_computes_what_peft_does(bias: bool, dropout: float, calls: list[Any]) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 48, bias=bias, compute_dtype=torch.float32, quant_type="nf4"))
    layer.load_state_dict(nn.Sequential(nn.Linear(64, 48, bias=bias)).state_dict())
    config = peft.LoraConfig(r=4, use_dora=True, lora_dropout=dropout, target_modules=["0"])
    patched, plain = pair_of(random_adapters(peft.get_peft_model(layer.to(tiny_models.DEVICE), config).train()), **ONLY)
    assert patched.liger_report.replaced == {"lora_linear": 1}
    calls.clear()
    x = torch.randn(3, 5, 64, device=tiny_models.DEVICE)
    results, expected = outcome(patched, x), outcome(plain, x)
    assert len(calls) == 1
    assert len(expected) == 5
    torch.testing.assert_close(results, expected)


def test_dora_needs_no_matrix_of_the_size_of_the_weight_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, a, b = torch.randn(96, 32).bfloat16(), torch.randn(4, 32), torch.randn(96, 4)
    expected = torch.linalg.vector_norm(weight.double() + 0.5 * b.double() @ a.double(), dim=1)
    monkeypatch.setattr(rule, "NORM_ELEMENTS", 32 * 10)
    sizes = recorded(monkeypatch, torch, "addmm", lambda y, *args, **options: y.numel())
    torch.testing.assert_close(rule._norms(weight, a, b, 0.5), expected.float())
    assert max(sizes) == 320


def hooked(*ends: str) -> Callable[[Any], None]:
    def hook(model: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith(ends):
                module.register_forward_hook(lambda module, args, output: 2 * output)

    return hook


# What is done to a model after `apply`, whether the op computes its layers then, and how many it computes together.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool, list[int] | None]] = {
    "disabled": (lambda model: model.base_model.disable_adapter_layers(), False, []),
    "merged": (lambda model: model.merge_adapter(), False, []),
    "unmerged": (lambda model: (model.merge_adapter(), model.unmerge_adapter()), True, None),
    "switched": (lambda model: model.set_adapter("other"), True, [3, 2]),
    "both": (lambda model: model.base_model.set_adapter(["default", "other"]), False, []),
    "hooked": (hooked("lora_A.default"), False, []),
    "hooked_base": (hooked("base_layer"), True, [3, 2]),
    "watched": (hooked("q_proj", "gate_proj"), True, [2]),
    "swappable": (swappable, False, None),
}


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_dropout_drops_the_share_that_it_should_and_keeps_the_expected_value(dora: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64, bias=False))
    config = peft.LoraConfig(r=4, lora_alpha=4, lora_dropout=0.25, use_dora=dora, target_modules=["0"])
    model = peft.get_peft_model(layer, config).train()
    (linear,) = (m for m in model.modules() if hasattr(m, "lora_A"))
    nn.init.zeros_(linear.base_layer.weight)
    nn.init.normal_(linear.lora_B["default"].weight)
    x = torch.ones(4000, 64)
    whole = linear.eval()(x)[0]
    assert liger_hf.apply(model).replaced == {"lora_linear": 1}
    torch.testing.assert_close(linear(x)[0], whole)
    dropped = linear.train()(x)
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(dropped.mean(0), whole, rtol=0.1, atol=0.05)
    # The variance of a sum of 64 terms, of which a quarter is missing and the others count 4/3.
    effective = linear.eval()(torch.eye(64)).t().detach()
    torch.testing.assert_close(dropped.var(0), effective.square().sum(1) / 3, rtol=0.15, atol=0.0)


def test_checkpointing_recomputes_with_the_same_dropout(calls: list[Any]) -> None:
    model = adapted(make(), lora_dropout=0.5)
    liger_hf.apply(model, **ONLY)
    torch.manual_seed(7)
    expected = step(model, **tokens())
    checkpoint_layers(model)
    torch.manual_seed(7)
    got = step(model, **tokens())
    assert calls
    torch.testing.assert_close(got, expected)


def test_a_layer_that_keeps_its_matmuls_does_not_repeat_those_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(make())
    expected = step(model, **tokens())
    liger_hf.apply(model)
    checkpointing.enable(model, "full")
    for layer in checkpointing.layers(model):
        checkpointing.keep(layer, checkpointing.Keeps.MATMULS)
    launched = []
    for kernel in KERNELS.values():
        if kernel.name.endswith(("::lora_linear", "::lora_linears")):
            launch, name = kernel.launch, kernel.name.partition("::")[2]
            monkeypatch.setattr(
                kernel, "launch", lambda *args, launch=launch, name=name: (launched.append(name), launch(*args))
            )
    # What is last is known after a first step.
    for _ in range(2):
        launched.clear()
        got = step(model, **tokens())
    # Only the last one of each layer may be launched again, and checkpointing ends before it.
    assert launched == 2 * ["lora_linears", "lora_linear", "lora_linears", "lora_linear"]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_autocast_gives_the_dtypes_and_nearly_the_gradients_of_peft(calls: list[Any]) -> None:
    plain = adapted(make(tie_word_embeddings=False))
    patched, inputs = twin(plain), tokens()
    liger_hf.apply(patched, **ONLY)
    exact = exact_step(plain, **inputs)
    with torch.autocast(inputs["input_ids"].device.type, dtype=torch.bfloat16):
        got, expected = step(patched, **inputs), step(plain, **inputs)
    assert calls
    assert {name: value.dtype for name, value in got.items()} == {name: value.dtype for name, value in expected.items()}
    ours, theirs = (
        sum(error(value, exact[name]).frobenius for name, value in found.items()) for found in (got, expected)
    )
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_compiled_model_has_no_graph_break(dora: bool, calls: list[Any]) -> None:
    model, inputs = adapted(make(num_hidden_layers=1), use_dora=dora), tokens()
    expected = step(model, **inputs)
    liger_hf.apply(model, exclude=["linear_cross_entropy"])
    torch._dynamo.reset()
    got = step(torch.compile(model, backend="aot_eager", fullgraph=True), **inputs)
    assert calls
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers in each call of lora_linears."""
    return recorded(monkeypatch, joint, "lora_linears", lambda x, **given: 3 if "a_3" in given else 2)


# How a model is adapted, and how many layers each of its layers computes together: q, k and v, then gate and up.
SHARED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "all": ({}, [3, 2]),
    "one_without_adapter": ({"target_modules": ["q_proj", "v_proj"]}, [2]),
    "ranks": ({"rank_pattern": {"k_proj": 2, "up_proj": 3}, "alpha_pattern": {"k_proj": 4, "up_proj": 6}}, [3, 2]),
    "scales": ({"alpha_pattern": {"k_proj": 3, "up_proj": 5}}, [2]),
    "dropout": ({"lora_dropout": 1e-9}, []),
    "dora": ({"use_dora": True}, []),
}


@pytest.mark.parametrize(("kind", "model_type"), [*((kind, "llama") for kind in SHARED), ("all", "qwen3")])
def test_layers_with_one_input_are_computed_together_and_get_the_gradients_of_peft(
    kind: str, model_type: str, shared: list[int]
) -> None:
    options, expected = SHARED[kind]
    model = make(tie_word_embeddings=False) if model_type == "llama" else sweep.build(model_type)
    plain = adapted(model.to(tiny_models.DEVICE), **options)
    patched = patched_twin(plain, exclude=["linear_cross_entropy"])
    shared.clear()
    assert step_disagreements(patched, plain) == {}
    assert shared == 2 * expected


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_active_is_looked_at_in_every_call(change: str, calls: list[Any], shared: list[int]) -> None:
    do, runs, expected = CHANGES[change]
    model = adapted(make(tie_word_embeddings=False))
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=3, target_modules="all-linear"))
    plain = random_adapters(model)
    patched, inputs = twin(plain), tokens()
    liger_hf.apply(patched, exclude=["linear_cross_entropy"])
    do(plain)
    do(patched)
    calls.clear(), shared.clear()
    outcomes = []
    for m in (patched, plain):
        outcomes.append([m(**inputs).loss])
        if outcomes[-1][0].requires_grad:
            trained = [p for p in m.parameters() if p.requires_grad]
            outcomes[-1] += torch.autograd.grad(*outcomes[-1], trained, allow_unused=True)
    assert bool(calls) == runs
    assert expected is None or shared == 2 * expected
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16], ids=["known", "other_dtype"])
def test_layers_of_4_bits_with_one_input_share_it(
    compute_dtype: torch.dtype, shared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    options = {"compute_dtype": compute_dtype, "quant_type": "nf4"}

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = bitsandbytes.nn.Linear4bit(64, 48, bias=True, **options)
            self.b = bitsandbytes.nn.Linear4bit(64, 32, bias=False, **options)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], -1)

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["a", "b"])
    patched, plain = pair_of(random_adapters(peft.get_peft_model(Pair().to(tiny_models.DEVICE), config).train()))
    shared.clear()
    x = torch.randn(3, 5, 64, device=tiny_models.DEVICE)
    expected, kept = outcome(plain, x), set[int]()
    alone = recorded(monkeypatch, bitsandbytes.nn.Linear4bit, "forward")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.add(t.numel()), t)[1], lambda t: t):
        results = outcome(patched, x)
    assert shared == [2]
    assert len(expected) == 6
    torch.testing.assert_close(results, expected)
    # Backward passes keep no dequantized weight. In evaluation, and in another dtype, the layers compute themselves.
    assert not kept & {48 * 64, 32 * 64}
    assert len(alone) == (2 if compute_dtype == torch.bfloat16 else 0)
    with torch.no_grad():
        patched(x)
    assert len(alone) == (4 if compute_dtype == torch.bfloat16 else 2)


def test_gate_and_up_may_be_overwritten_as_those_of_layers_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, gated_mlp, "unshared", after=lambda result, parts: result)
    model = adapted(make())
    liger_hf.apply(model)
    found.clear()
    step(model, **tokens())
    assert found == [True, True]


@pytest.mark.parametrize("options", [{}, {"mlp_rows": 4}], ids=["whole", "tiles"])
def test_undo_restores_forwards_that_called_layers_together(options: dict[str, Any], shared: list[int]) -> None:
    model, inputs = adapted(make()), tokens()
    before = step(model, **inputs)
    report = liger_hf.apply(model, **options)
    assert "In 2 modules, linear layers with adapters that read the same input read it once." in report.notes
    shared.clear()
    torch.testing.assert_close(step(model, **inputs), before, rtol=1e-4, atol=1e-5)
    assert {2, 3} <= set(shared)
    second = liger_hf.apply(model, **options)
    assert not any("read it once" in note for note in second.notes)
    report.undo()
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in step(model, **inputs).items())


class Forwards(nn.Module):
    """Forwards of which some calls can be made together, and others not."""

    def in_one_statement(self, x: Tensor) -> Any:
        return self.a(x) + self.b(x), self.c(x)

    def in_a_block(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.a(x)
        return y, self.b(x), self.c(x)

    def changed_between(self, x: Tensor) -> Any:
        y = self.a(x)
        x.add_(1)
        return y, self.b(x)


GROUPS = {"in_one_statement": ["abc"], "in_a_block": ["bc"], "changed_between": []}


@pytest.mark.parametrize(("name", "expected"), GROUPS.items(), ids=str)
def test_only_calls_that_surely_come_with_one_input_are_rewritten(name: str, expected: list[str]) -> None:
    groups: list[str] = []

    def together(modules: Any, x: Any) -> Any:
        groups.append("".join(module.name for module in modules))
        return [module(x) for module in modules]

    module: Any = Forwards()
    for child in "abc":
        setattr(module, child, nn.Identity())
        getattr(module, child).name = child
    names = {"__liger_together__": together, "__liger_take__": joint._take}
    function = with_shared_inputs(getattr(Forwards, name), "abc", names)
    x = torch.arange(3.0)
    if function is not None:
        torch.testing.assert_close(function(module, x), getattr(module, name)(x))
    assert groups == expected
