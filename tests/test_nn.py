# SPDX-License-Identifier: Apache-2.0
"""Modules compute what their functions do, and have the weights of torch and of Transformers."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_core
from liger_core import OptionError, cross_entropy, linear_cross_entropy, losses, nn, op
from liger_core.builtin import CATALOGUE
from liger_core.op import Op
from liger_core.ops._inputs import normal

CLASSES = {name: value for name, value in vars(nn).items() if inspect.isclass(value) and value.__module__ == nn.__name__}
FUNCTIONS = {name: kind for name, kind in CLASSES.items() if issubclass(kind, nn.FunctionModule) and kind is not nn.FunctionModule}
NORMS = {name: kind for name, kind in CLASSES.items() if issubclass(kind, nn.Norm) and kind is not nn.Norm}
# What gives no loss.
PARTS = {"kto_baseline", "top_classes"}


def test_every_op_and_every_loss_has_a_module() -> None:
    of_ops = {kind.function for kind in FUNCTIONS.values()} | {kind.op for kind in NORMS.values()}
    of_ops |= {liger_core.qk_norm_rope, liger_core.embedding, liger_core.group_norm, liger_core.poly_norm, liger_core.dyt}
    of_ops.add(liger_core.attention_residual)
    # Transformers has modules of experts and PEFT of adapted layers, which `liger_hf.apply` gives these ops.
    assert [o.name for o in CATALOGUE if o not in of_ops] == ["experts", "lora_linear", "lora_linears"]
    functions = {name: value for name in losses.__all__ if inspect.isfunction(value := getattr(losses, name)) and name not in PARTS}
    assert [name for name, function in functions.items() if function not in of_ops] == []


OF_OPS = {name: kind for name, kind in FUNCTIONS.items() if isinstance(kind.function, Op)}


@pytest.mark.parametrize("name", OF_OPS)
def test_a_module_is_its_op_with_the_options_of_the_constructor(name: str, device: torch.device) -> None:
    kind = OF_OPS[name]
    for sample in kind.function.samples(device, torch.float32):
        torch.manual_seed(0)
        given = kind.function.signature.bind(*sample.args, **sample.kwargs).arguments
        options = {key: value for key, value in given.items() if key in kind.signature.parameters}
        tensors = {key: value for key, value in given.items() if key not in options}
        if not set(options) & {"inplace", "overwrite"}:
            assert_same(kind(**options)(**tensors), kind.function(**given))


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rows_are_scaled_by_one_at_first(name: str, offset: float, device: torch.device) -> None:
    kind = NORMS[name]
    options = {"weight_offset": offset} if "weight_offset" in kind.signature.parameters else {}
    rows = [torch.randn(shape, device=device) for shape in shapes_of(kind)]
    assert_same(kind(8, device=device, **options)(*rows), kind.op(*rows))


def shapes_of(kind: Any) -> list[tuple[int, ...]]:
    """Those of three rows; a sample of three tokens has one row of what modulates it."""
    one = "tokens" in kind.op.layout.arguments["x"]
    return [(8,) if one and name != "x" else (3, 8) for name in kind.rows]


@pytest.mark.parametrize(("name", "options"), [("RMSNorm", {}), ("LayerNorm", {}), ("LayerNorm", {"bias": False})], ids=str)
def test_a_norm_takes_the_state_of_the_one_in_torch(name: str, options: dict[str, Any], device: torch.device) -> None:
    theirs, ours = getattr(torch.nn, name)(16, 1e-5, **options), getattr(nn, name)(16, 1e-5, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(16))
    assert ours.load_state_dict(theirs.state_dict()) == theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 16)
    torch.testing.assert_close(ours(x), theirs(x))


def test_without_elementwise_affine_there_is_no_weight() -> None:
    norm = nn.RMSNorm(8, elementwise_affine=False)
    assert norm.state_dict() == {}
    assert norm(torch.ones(2, 8)).shape == (2, 8)


def of_transformers(module: str, name: str) -> Any:
    return getattr(pytest.importorskip(f"transformers.models.{module}"), name)


def config(kind: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(kind, hidden_size=16, intermediate_size=24, num_attention_heads=2, pad_token_id=0, **options)


MLPS = {
    "llama": ("llama.modeling_llama", "LlamaMLP", {}),
    "gemma": ("gemma.modeling_gemma", "GemmaMLP", {"activation": "gelu_tanh"}),
    "gemma_exact": ("gemma.modeling_gemma", "GemmaMLP", {"activation": "gelu"}),
    "gemma_named": ("gemma.modeling_gemma", "GemmaMLP", {"activation": "gelu_pytorch_tanh"}),
    "phi3": ("phi3.modeling_phi3", "Phi3MLP", {"packed": True}),
    "falcon_h1": ("falcon_h1.modeling_falcon_h1", "FalconH1MLP", {"gate_scale": 0.4, "scale": 2.5}),
    "falcon_h1_bias": ("falcon_h1.modeling_falcon_h1", "FalconH1MLP", {"gate_scale": 0.4, "scale": 1.0, "bias": True}),
}
# Of their configurations.
SETTINGS = {
    "falcon_h1": {"mlp_multipliers": [0.4, 2.5]},
    "falcon_h1_bias": {"mlp_multipliers": [0.4, 1.0], "mlp_bias": True},
}


@pytest.mark.parametrize("kind", MLPS)
def test_a_gated_mlp_takes_the_state_of_the_one_in_transformers(kind: str) -> None:
    module, name, options = MLPS[kind]
    theirs = of_transformers(module, name)(config(module.partition(".")[0], **SETTINGS.get(kind, {})))
    if kind == "gemma_exact":
        # Not by its configuration, of which "gelu" means the approximation since Transformers 5.24.
        theirs.act_fn = torch.nn.GELU()
    ours = nn.GatedMLP(16, 24, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 16)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("packed", [False, True])
def test_a_gated_mlp_has_the_squared_relu_of_its_gate(packed: bool) -> None:
    mlp, x = nn.GatedMLP(16, 24, activation="relu_squared", packed=packed), torch.randn(3, 16)
    gate, up = mlp.gate_up_proj(x).chunk(2, -1) if packed else (mlp.gate_proj(x), mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), mlp.down_proj(gate.relu().square() * up))


def test_a_gated_mlp_has_the_limit_of_gpt_oss() -> None:
    mlp, x = nn.GatedMLP(16, 24, packed=True, limit=0.2, alpha=1.702, shift=1.0), torch.randn(3, 16)
    gate, up = mlp.gate_up_proj(x).chunk(2, -1)
    gate, up = gate.clamp(max=0.2), up.clamp(-0.2, 0.2)
    torch.testing.assert_close(mlp(x), mlp.down_proj(gate * torch.sigmoid(1.702 * gate) * (up + 1.0)))


def test_the_rotary_embedding_is_that_of_llama() -> None:
    theirs = of_transformers("llama.modeling_llama", "LlamaRotaryEmbedding")(config("llama"))
    ours, x, places = nn.RotaryEmbedding(8), torch.randn(2, 5, 16), torch.arange(5)[None]
    torch.testing.assert_close(ours(x, places), theirs(x, places))
    assert ours.state_dict() == theirs.state_dict() == {}


def test_a_rotary_embedding_in_bfloat16_keeps_the_accuracy_of_its_angles() -> None:
    x, places = torch.zeros(1, dtype=torch.bfloat16), torch.arange(2048)[None]
    exact = [angle.bfloat16() for angle in nn.RotaryEmbedding(64)(x.float(), places)]
    assert all(map(torch.equal, nn.RotaryEmbedding(64).bfloat16()(x, places), exact))


def test_normalized_queries_and_keys_are_those_of_qwen3() -> None:
    attention = of_transformers("qwen3.modeling_qwen3", "Qwen3Attention")(config("qwen3", head_dim=8, num_key_value_heads=1), 0)
    rotate = of_transformers("qwen3.modeling_qwen3", "apply_rotary_pos_emb")
    state = {name: torch.randn(8) for name in ("q_norm.weight", "k_norm.weight")}
    attention.load_state_dict(state, strict=False)
    ours = nn.QKNormRoPE(8)
    ours.load_state_dict(state)
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 1, 5, 8)
    cos, sin = nn.RotaryEmbedding(8)(q, torch.arange(5)[None])
    torch.testing.assert_close(ours(q, k, cos, sin), rotate(attention.q_norm(q), attention.k_norm(k), cos, sin))


def test_interleaved_angles_are_for_neighboring_columns() -> None:
    q, positions = torch.randn(1, 2, 5, 8), torch.arange(5)[None]
    apart = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    (turned, _), (expected, _) = (
        nn.RoPE(interleaved=interleaved)(x, x, *nn.RotaryEmbedding(8, interleaved=interleaved)(x, positions))
        for interleaved, x in ((True, q), (False, q[..., apart]))
    )
    torch.testing.assert_close(turned[..., apart], expected)


# -- options


def test_an_option_that_may_be_a_tensor_can_come_with_the_call() -> None:
    logits, target = torch.randn(4, 9), torch.arange(4)
    loss = nn.CrossEntropyLoss(reduction="mean", normalizer=2.0)
    assert torch.equal(loss(logits, target, normalizer=8.0), cross_entropy(logits, target, normalizer=8.0))
    assert torch.equal(loss(logits, target), cross_entropy(logits, target, normalizer=2.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.CrossEntropyLoss(label_smooting=0.1), "CrossEntropyLoss: options must be among ignore_index, .* Did you mean 'label_smoothing'"),
        (lambda: nn.RMSNorm(8, offset=1.0), "RMSNorm: options must be among eps, .* cast, device, dtype, got 'offset'"),
        (lambda: nn.LayerNorm(8, cast="input"), "LayerNorm: options must be among eps, elementwise_affine, bias, device, dtype, got 'cast'"),
        (lambda: nn.GatedMLP(8, 8, activation="relu"), "GatedMLP: activation must be one of 'silu', 'gelu_tanh', .*, 'relu_squared', got 'relu'"),
        (lambda: nn.RotaryEmbedding(7), "RotaryEmbedding: rotary must be even and > 0, got 7"),
    ],
    ids=["loss", "norm", "norm_without_options", "mlp", "rotary"],
)  # fmt: skip
def test_a_wrong_option_is_an_error_when_the_module_is_made(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_too_many_tensors_are_an_error() -> None:
    with pytest.raises(TypeError, match="ReLUSquared: the call must have at most x, up, got 3 values"):
        nn.ReLUSquared()(torch.ones(1), torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError, match="RMSNorm: the call must have at most x, got 2 values"):
        nn.RMSNorm(8)(torch.ones(8), torch.ones(8))


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_takes_its_rows_by_name(name: str, device: torch.device) -> None:
    kind = NORMS[name]
    rows = {row: torch.randn(shape, device=device) for row, shape in zip(kind.rows, shapes_of(kind), strict=True)}
    assert_same(kind(8, device=device)(**rows), kind(8, device=device)(*rows.values()))


def test_a_call_without_a_tensor_names_it() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'residual'"):
        nn.AddRMSNorm(8)(torch.ones(8))


@pytest.mark.parametrize("module", [nn.SwiGLU(), nn.GatedRMSNorm(8)], ids=["function", "norm"])
def test_a_tensor_that_is_given_twice_is_an_error(module: torch.nn.Module) -> None:
    with pytest.raises(TypeError, match=f"{type(module).__name__}: gate must be given once, got it by position and by name"):
        module(torch.ones(1, 8), torch.ones(1, 8), gate=torch.ones(1, 8))


def test_a_module_prints_its_options() -> None:
    assert str(nn.LinearCrossEntropyLoss(softcap=30.0)) == "LinearCrossEntropyLoss(softcap=30.0)"
    assert str(nn.RMSNorm(8, weight_offset=1.0)) == "RMSNorm(8, eps=1e-06, weight_offset=1.0)"


# -- modules in a model


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 16)
        self.attended, self.mlp = nn.AddRMSNorm(16), nn.GatedMLP(16, 24)
        self.norm, self.head = nn.LayerNorm(16), torch.nn.Linear(16, 20, bias=False)
        self.loss = nn.LinearCrossEntropyLoss(ignore_index=0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        normed, x = self.attended(x, x)
        x = self.norm(x + self.mlp(normed))
        loss: Tensor = self.loss(x[:, :-1].flatten(0, 1), self.head.weight, ids[:, 1:].flatten())
        return loss


def gradients(model: torch.nn.Module, call: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    call(ids).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("way", ["copied", "pickled", "compiled"])
def test_a_model_of_modules_trains_when_it_is(way: str) -> None:
    model, ids = Model(), torch.randint(1, 20, (2, 6))
    expected = gradients(model, model, ids)
    torch._dynamo.reset()
    other = {"copied": copy.deepcopy, "pickled": lambda m: pickle.loads(pickle.dumps(m)), "compiled": lambda m: m}[way](model)
    call = torch.compile(other, fullgraph=True, backend="aot_eager") if way == "compiled" else other
    torch.testing.assert_close(gradients(other, call, ids), expected)


def test_the_loss_module_is_the_op() -> None:
    hidden, weight, target = normal(torch.device("cpu"), torch.float32, 5, 8), torch.randn(9, 8), torch.arange(5)
    assert torch.equal(
        nn.LinearCrossEntropyLoss(softcap=5.0)(hidden, weight, target), linear_cross_entropy(hidden, weight, target, softcap=5.0)
    )


def test_an_op_of_a_package_of_its_own_becomes_a_module() -> None:
    def check(x: Tensor, factor: float = 2.0) -> None: ...

    nothing: Any = lambda *args: iter(())  # noqa: E731

    @op(check=check, samples=nothing, misuses=nothing, workloads=nothing, work=nothing)
    def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    assert nn.function_module("Scaled", scaled)(factor=3.0)(torch.ones(())) == 3.0


def halved(x: Tensor, by: float = 2.0) -> Tensor:
    return x / by


Halved = nn.function_module("Halved", halved)


def test_a_module_of_ones_own_can_be_pickled() -> None:
    module = pickle.loads(pickle.dumps(Halved(by=4.0)))
    assert type(module) is Halved
    assert module(torch.ones(())) == 0.25


def test_an_embedding_is_that_of_torch_with_exact_sums(device: torch.device) -> None:
    ours, theirs = nn.Embedding(5, 8, padding_idx=1, device=device), torch.nn.Embedding(5, 8, padding_idx=1, device=device)
    theirs.load_state_dict(ours.state_dict())
    index = torch.tensor([[0, 1, 4], [4, 4, 2]], device=device)
    for module in (ours, theirs):
        module(index).square().sum().backward()
    assert torch.equal(ours(index), theirs(index))
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    with pytest.raises(OptionError, match="sparse must be False, got True"):
        nn.Embedding(5, 8, sparse=True)


MADE: dict[str, Any] = {
    **{name: lambda kind=kind, **where: kind(16, **where) for name, kind in NORMS.items()},
    "GroupNorm": lambda **where: nn.GroupNorm(4, 16, **where),
    "PolyNorm": nn.PolyNorm,
    "DyT": lambda **where: nn.DyT(16, 0.7, **where),
    "HyperConnection": lambda **where: nn.HyperConnection(16, 2, **where),
    "AttentionResidual": lambda **where: nn.AttentionResidual(16, **where),
    "QKNormRoPE": lambda **where: nn.QKNormRoPE(16, **where),
    "GatedMLP": lambda **where: nn.GatedMLP(16, 24, **where),
    "Embedding": lambda **where: nn.Embedding(9, 16, **where),
}


def test_every_module_with_tensors_is_among_those_made_on_the_meta_device() -> None:
    assert set(CLASSES) - set(FUNCTIONS) - {"FunctionModule", "Norm", "RotaryEmbedding"} == set(MADE)
    assert not list(nn.RotaryEmbedding(16).buffers())


@pytest.mark.parametrize("name", MADE)
def test_a_module_from_the_meta_device_begins_as_any_other(name: str) -> None:
    def tensors(module: torch.nn.Module) -> dict[str, Tensor]:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    torch.manual_seed(0)
    expected = tensors(MADE[name]())
    module = MADE[name](device="meta").to_empty(device="cpu")
    for tensor in tensors(module).values():
        tensor.data.fill_(7.0)
    torch.manual_seed(0)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    torch.testing.assert_close(tensors(module), expected, rtol=0, atol=0)


def test_a_module_from_the_meta_device_gets_memory_for_its_options() -> None:
    with torch.device("meta"):
        loss = nn.LinearCrossEntropyLoss(normalizer=torch.tensor(7.0))
        mean = nn.DFTLoss(averaging=losses.Averaging(count=torch.tensor(7.0)))
    assert loss.to_empty(device="cpu").normalizer.device.type == "cpu"
    assert mean.to_empty(device="cpu").arguments["averaging"].count.device.type == "cpu"


@pytest.mark.parametrize("op", CATALOGUE, ids=lambda op: str(op.name))
def test_an_op_is_pickled_and_copied_as_itself(op: Op[..., Any]) -> None:
    assert pickle.loads(pickle.dumps(op)) is op
    assert copy.deepcopy(torch.nn.Sequential(torch.nn.Identity(), Held(op)))[1].op is op


class Held(torch.nn.Module):
    """A model that keeps an op as an attribute, as Transformers keeps activations."""

    def __init__(self, op: Op[..., Any]) -> None:
        super().__init__()
        self.op = op


def test_a_hyper_connection_in_float64_computes_in_float64() -> None:
    module = nn.HyperConnection(8, 2).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    n, logits = 2, liger_core.project_streams(x, module.fn)
    post = 2 * (logits[:, n : 2 * n] * module.scale[1] + module.base[n : 2 * n]).sigmoid()
    torch.testing.assert_close(module(x)[1], post, rtol=1e-14, atol=0)
