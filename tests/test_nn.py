# SPDX-License-Identifier: Apache-2.0
"""Modules compute what their ops do, and have the weights of torch and of Transformers."""

import copy
import doctest
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_core
from liger_core import OptionError, linear_log_prob, merge_streams, nn, rope
from liger_core.builtin import CATALOGUE
from liger_core.docstrings import parts
from liger_core.op import Op

CLASSES = {name: getattr(nn, name) for name in nn.__all__}


@pytest.mark.parametrize("name", CLASSES)
def test_the_example_of_a_docstring_runs(name: str) -> None:
    names = {"torch": torch, "nn": nn, "rope": rope, "merge_streams": merge_streams}
    (example,) = doctest.DocTestFinder(recurse=False).find(CLASSES[name], name, globs=names)

    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("name", [name for name, kind in CLASSES.items() if "__init__" in vars(kind)])
def test_a_docstring_describes_every_argument_of_the_constructor(name: str) -> None:
    rows = [row for part in parts(CLASSES[name].__doc__ or "") if isinstance(part, list) for row in part]

    assert set(inspect.signature(CLASSES[name]).parameters) <= {argument for row in rows for argument in row.names}


NORMS = {
    "RMSNorm": (liger_core.rms_norm, 1, {"weight_offset": 1.0, "cast": "float32"}),
    "AddRMSNorm": (liger_core.add_rms_norm, 2, {"weight_offset": 1.0, "cast": "float32"}),
    "GatedRMSNorm": (liger_core.gated_rms_norm, 2, {"weight_offset": 1.0, "activation": "sigmoid", "gate_first": True, "group_size": 4}),
    "LayerNorm": (liger_core.layer_norm, 1, {}),
    "AddLayerNorm": (liger_core.add_layer_norm, 2, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_its_op_and_scales_rows_by_one_at_first(name: str, device: torch.device) -> None:
    op, inputs, options = NORMS[name]
    rows = [torch.randn(3, 8, dtype=torch.bfloat16, device=device) for _ in range(inputs)]
    weight = torch.full((8,), 1.0 - options.get("weight_offset", 0.0), device=device)
    expected = op(*rows, weight, eps=1e-3, **options)

    torch.testing.assert_close(CLASSES[name](8, 1e-3, device=device, **options)(*rows), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NORMS)
def test_without_elementwise_affine_a_norm_has_no_weight(name: str, device: torch.device) -> None:
    op, inputs, _ = NORMS[name]
    rows = [torch.randn(3, 8, device=device) for _ in range(inputs)]
    norm = CLASSES[name](8, 1e-3, elementwise_affine=False)

    assert norm.state_dict() == {}
    torch.testing.assert_close(norm(*rows), op(*rows, eps=1e-3), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("RMSNorm", (16,), {}),
        ("LayerNorm", (16,), {}),
        ("LayerNorm", (16,), {"bias": False}),
        ("GroupNorm", (4, 16), {}),
    ],
    ids=str,
)
def test_a_norm_takes_the_state_of_the_one_in_torch(name: str, sizes: Any, options: dict[str, Any]) -> None:
    theirs, ours = (getattr(kind, name)(*sizes, 1e-5, **options) for kind in (torch.nn, nn))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(16))
    assert ours.load_state_dict(theirs.state_dict()) == theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 16)
    torch.testing.assert_close(ours(x), theirs(x))


def test_modules_begin_as_their_papers_say(device: torch.device) -> None:
    x = torch.randn(5, 3, 24, device=device)
    begun = {nn.AttentionResidual(24): x.mean(0), nn.DyT(24): torch.tanh(0.5 * x)}
    begun[nn.PolyNorm()] = sum(liger_core.rms_norm(x**k) for k in (1, 2, 3)) / 3
    for module, expected in begun.items():
        torch.testing.assert_close(module.to(device)(x), expected)
    assert nn.DyT(8, bias=False, alpha=2.0).bias is None


def of_transformers(module: str, name: str) -> Any:
    return getattr(pytest.importorskip(f"transformers.models.{module}"), name)


def config(kind: str, **options: Any) -> Any:
    options |= {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "pad_token_id": 0}
    return pytest.importorskip("transformers").AutoConfig.for_model(kind, **options)


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


def test_the_rotary_embedding_is_that_of_llama() -> None:
    theirs = of_transformers("llama.modeling_llama", "LlamaRotaryEmbedding")(config("llama"))
    ours, x, places = nn.RotaryEmbedding(8), torch.randn(2, 5, 16), torch.arange(5)[None]
    torch.testing.assert_close(ours(x, places), theirs(x, places))
    assert ours.state_dict() == theirs.state_dict() == {}


def test_a_rotary_embedding_in_bfloat16_keeps_the_accuracy_of_its_angles() -> None:
    x, places = torch.zeros(1, dtype=torch.bfloat16), torch.arange(2048)[None]
    exact = [angle.bfloat16() for angle in nn.RotaryEmbedding(64)(x.float(), places)]
    assert all(map(torch.equal, nn.RotaryEmbedding(64).bfloat16()(x, places), exact))


def test_interleaved_angles_are_for_neighboring_columns() -> None:
    q, positions = torch.randn(1, 2, 5, 8), torch.arange(5)[None]
    apart = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    (turned, _), (expected, _) = (
        rope(x, x, *nn.RotaryEmbedding(8, interleaved=interleaved)(x, positions), interleaved=interleaved)
        for interleaved, x in ((True, q), (False, q[..., apart]))
    )
    torch.testing.assert_close(turned[..., apart], expected)


def test_experts_take_the_state_of_those_in_transformers() -> None:
    theirs = of_transformers("mixtral.modeling_mixtral", "MixtralExperts")(config("mixtral", num_local_experts=3))
    ours = nn.Experts(3, 16, 24)
    theirs.load_state_dict(ours.state_dict())
    x, index, weight = torch.randn(5, 16), torch.tensor([[0, 2]]).expand(5, 2), torch.rand(5, 2)
    torch.testing.assert_close(ours(x, index, weight), theirs(x, index, weight))


def test_options_of_a_head_come_with_the_constructor_or_the_call() -> None:
    hidden, weight, target = torch.randn(5, 8), torch.randn(9, 8), torch.arange(5)
    log_prob = nn.LogProb(temperature=0.5, softcap=3.0)
    for temperature, call in ((0.5, {}), (0.7, {"temperature": 0.7})):
        expected = linear_log_prob(hidden, weight, target, softcap=3.0, temperature=temperature)
        assert torch.equal(log_prob(hidden, weight, target, **call), expected)
    loss = nn.LinearCrossEntropyLoss(softcap=3.0)(hidden, weight, target)
    torch.testing.assert_close(loss, -linear_log_prob(hidden, weight, target, softcap=3.0).mean())


HEAD = (torch.ones(3, 8), torch.ones(9, 8), torch.arange(3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.LinearCrossEntropyLoss(label_smooting=0.1)(*HEAD), TypeError, "linear_cross_entropy: .* 'label_smoothing'"),
        (lambda: nn.GatedMLP(8, 8, limt=7.0)(torch.ones(8)), TypeError, "swiglu: .* Did you mean 'limit'"),
        (lambda: nn.GatedMLP(8, 8, activation="gelu", limit=7.0)(torch.ones(8)), TypeError, "geglu: arguments must be .* 'limit'"),
        (lambda: nn.RMSNorm(8, eps=-1.0)(torch.ones(8)), OptionError, "rms_norm: eps must be a finite number > 0"),
        (lambda: nn.GatedMLP(8, 8, activation="relu"), OptionError, "GatedMLP: activation must be .* got 'relu'"),
        (lambda: nn.LayerNorm((4, 8)), OptionError, r"LayerNorm: width must be an integer, got \(4, 8\)"),
        (lambda: nn.AddRMSNorm((4, 8)), OptionError, r"AddRMSNorm: width must be an integer, got \(4, 8\)"),
        (lambda: nn.RotaryEmbedding(7), OptionError, "RotaryEmbedding: rotary must be even and > 0, got 7"),
        (lambda: nn.Embedding(5, 8, sparse=True)(torch.tensor(1)), OptionError, "sparse=True; use torch.nn.Embedding"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_an_error_that_names_it(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


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
    again = {"copied": copy.deepcopy, "pickled": lambda m: pickle.loads(pickle.dumps(m)), "compiled": lambda m: m}
    other = again[way](model)
    call = torch.compile(other, fullgraph=True, backend="aot_eager") if way == "compiled" else other
    torch.testing.assert_close(gradients(other, call, ids), expected)


def test_an_embedding_is_that_of_torch_with_exact_sums(device: torch.device) -> None:
    ours, theirs = (kind.Embedding(5, 8, padding_idx=1, device=device) for kind in (nn, torch.nn))
    theirs.load_state_dict(ours.state_dict())
    index = torch.tensor([[0, 1, 4], [4, 4, 2]], device=device)
    for module in (ours, theirs):
        module(index).square().sum().backward()
    assert torch.equal(ours(index), theirs(index))
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


MADE: dict[str, Any] = {
    "RMSNorm": lambda **where: nn.RMSNorm(16, weight_offset=1.0, **where),
    "AddRMSNorm": lambda **where: nn.AddRMSNorm(16, **where),
    "GatedRMSNorm": lambda **where: nn.GatedRMSNorm(16, **where),
    "LayerNorm": lambda **where: nn.LayerNorm(16, **where),
    "AddLayerNorm": lambda **where: nn.AddLayerNorm(16, **where),
    "GroupNorm": lambda **where: nn.GroupNorm(4, 16, **where),
    "PolyNorm": nn.PolyNorm,
    "DyT": lambda **where: nn.DyT(16, 0.7, **where),
    "HyperConnection": lambda **where: nn.HyperConnection(16, 2, **where),
    "AttentionResidual": lambda **where: nn.AttentionResidual(16, **where),
    "GatedMLP": lambda **where: nn.GatedMLP(16, 24, **where),
    "Experts": lambda **where: nn.Experts(3, 16, 24, **where),
    "Embedding": lambda **where: nn.Embedding(9, 16, **where),
}


def test_every_module_with_tensors_is_among_those_made_on_the_meta_device() -> None:
    assert set(CLASSES) - {"RotaryEmbedding", "LinearCrossEntropyLoss", "LogProb"} == set(MADE)


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
