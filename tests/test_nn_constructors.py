# SPDX-License-Identifier: Apache-2.0
"""What the constructors of modules say that they take, what they take, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import pydoc
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core import OptionError, ShapeError, cross_entropy, losses, nn
from liger_core.docstrings import parts
from liger_core.losses import Averaging, OffPolicy, Penalty
from liger_core.op import Misuse, Op

CPU = torch.device("cpu")
BASES = (nn.FunctionModule, nn.Norm)
CLASSES = {name: kind for name in nn.__all__ if inspect.isclass(kind := getattr(nn, name)) and kind not in BASES}
FUNCTIONS = {name: kind for name, kind in CLASSES.items() if issubclass(kind, nn.FunctionModule)}
NORMS = {name: kind for name, kind in CLASSES.items() if issubclass(kind, nn.Norm)}
SIZES = {
    "width": 8, "hidden_size": 8, "intermediate_size": 12, "streams": 2, "num_groups": 2, "num_channels": 8, "num_embeddings": 9,
    "embedding_dim": 8, "rotary": 8,
}  # fmt: skip

pytestmark = pytest.mark.cpu


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kind).parameters)


def made(kind: Any, /, **options: Any) -> Any:
    """With what is required."""
    return kind(**{**{name: SIZES[name] for name, p in parameters(kind).items() if p.default is p.empty}, **options})


# -- what they say


@pytest.mark.parametrize("name", CLASSES)
def test_the_docstring_of_a_module_describes_every_argument_of_its_constructor(name: str) -> None:
    kind = CLASSES[name]
    rows = [row for part in parts(kind.__doc__ or "", parameters(kind)) if isinstance(part, list) for row in part]
    assert set(parameters(kind)) <= {argument for row in rows for argument in row.names}
    assert [row.names for row in rows if not row.text or row.text.startswith("an argument of")] == []
    assert all(argument in pydoc.render_doc(kind) for argument in parameters(kind))


@pytest.mark.parametrize("name", {**FUNCTIONS, **NORMS})
def test_a_generated_module_describes_its_call_and_not_the_arguments_of_the_op_that_it_holds(name: str) -> None:
    kind = CLASSES[name]
    constructor, *others = (kind.__doc__ or "").split("\n\nThe call takes:\n\n")
    (call,) = others
    given = kind.tensors if name in FUNCTIONS else kind.rows
    named = [argument for part in parts(call) if isinstance(part, list) for row in part for argument in row.names]
    assert named == [*given, "returns", *(() if name in FUNCTIONS else kind.weights)]
    described = {
        argument for part in parts(constructor, parameters(kind)) if isinstance(part, list) for row in part for argument in row.names
    }
    assert described == set(parameters(kind))


@pytest.mark.parametrize("name", CLASSES)
def test_the_signature_of_a_module_is_what_its_constructor_takes(name: str) -> None:
    kind = CLASSES[name]
    assert not {p.kind for p in parameters(kind).values()} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    for argument, parameter in parameters(kind).items():
        if parameter.default is parameter.empty:
            with pytest.raises(TypeError, match=argument):
                kind(**{other: size for other, size in SIZES.items() if other != argument and other in parameters(kind)})
        elif name != "GatedMLP" or argument not in ("limit", "alpha", "shift", "gate_scale", "scale", "overwrite"):
            made(kind, **{argument: parameter.default})
    with pytest.raises((OptionError, TypeError), match="nothing_of_that_name"):
        made(kind, nothing_of_that_name=1)


@pytest.mark.parametrize("name", {**FUNCTIONS, **NORMS})
def test_the_signature_of_a_module_has_the_defaults_and_annotations_of_its_op(name: str) -> None:
    function = FUNCTIONS[name].function if name in FUNCTIONS else NORMS[name].op
    theirs = inspect.signature(function.reference if isinstance(function, Op) else function, eval_str=True).parameters
    for argument, parameter in parameters(CLASSES[name]).items():
        if argument in theirs and argument != "bias":
            assert (parameter.default, parameter.annotation) == (theirs[argument].default, theirs[argument].annotation)


def test_a_subclass_has_the_signature_of_its_own_constructor() -> None:
    class Gemma(nn.RMSNorm):  # type: ignore[name-defined, misc]
        def __init__(self, hidden_size: int) -> None:
            super().__init__(hidden_size, weight_offset=1.0, cast="float32")

    assert list(parameters(Gemma)) == ["hidden_size"]
    assert str(Gemma(8)) == "Gemma(width=8, weight_offset=1.0, cast='float32', eps=1e-06)"


def plain(x, factor=2.0):  # type: ignore[no-untyped-def]
    return x * factor


Plain = nn.function_module("Plain", plain)


def test_a_function_without_docstring_and_annotations_becomes_a_module_that_names_its_options() -> None:
    assert "factor  an argument of `plain`" in (Plain.__doc__ or "")
    assert Plain(factor=3.0)(torch.ones(())) == 3.0
    assert nn.function_module("Partial", partial(plain, factor=4.0))()(torch.ones(())) == 4.0


def evaluated(x: Tensor, scale: Tensor | None = None, by: float = 2.0) -> Tensor:
    return x / by


# As in a file without `from __future__ import annotations`.
evaluated.__annotations__ = {"x": Tensor, "scale": Tensor | None, "by": float, "return": Tensor}


def test_tensors_belong_to_the_call_whether_annotations_are_evaluated_or_not() -> None:
    assert nn.function_module("Evaluated", evaluated).tensors == ("x", "scale")


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_pickled_by_its_public_place(name: str) -> None:
    kind = CLASSES[name]
    assert kind.__module__ == "liger_core.nn"
    assert pickle.loads(pickle.dumps(kind)) is kind


# -- what they refuse

# Misuses of an option beside tensors that lack what it needs, which other tensors have.
WITH_OTHER_TENSORS = {
    ("linear_divergence", "hard_weight"): "needs a target",
    ("linear_divergence", "budget"): "is enough for fewer classes",
    ("linear_cross_entropy", "budget"): "is enough for fewer classes",
    ("linear_log_prob", "budget"): "is enough for fewer classes",
    ("linear_log_prob", "allowed_statistics"): "is right without allowed",
    ("rope", "inplace_expanded"): "is right for dense tensors",
    ("rope", "inplace_leaf"): "is right for results of other functions",
    ("linear_log_prob", "logits_dtype"): "is right for float64",
    ("linear_log_prob", "temperature_of_a_token"): "has another value, which only the call reads",
    ("linear_log_prob", "trainable_temperature"): "has a shape that no sample has",
}


def misuses_of_options() -> dict[str, tuple[str, Misuse, dict[str, Any]]]:
    """Wrong calls that are right without the options that the constructor of the module takes."""
    found = {}
    for name, kind in {**FUNCTIONS, **NORMS}.items():
        op = kind.function if name in FUNCTIONS else kind.op
        for misuse in op.misuses(CPU) if isinstance(op, Op) else ():
            given = op.signature.bind(*misuse.args, **misuse.kwargs).arguments
            # A bias of an op is a tensor, that of a constructor says whether there is one.
            options = {key: value for key, value in given.items() if key in parameters(kind) and key != "bias"}
            shapes = misuse.error is ShapeError
            if options and not shapes and (op.name, misuse.name) not in WITH_OTHER_TENSORS and is_right(op, given, options):
                found[f"{name}-{misuse.name}"] = (name, misuse, options)
    return found


def is_right(op: Op[..., Any], given: dict[str, Any], options: dict[str, Any]) -> bool:
    try:
        op.check(**{key: value for key, value in given.items() if key not in options})
    except Exception:
        return False
    return True


MISUSES = misuses_of_options()


def test_misuses_of_many_options_are_among_those_that_constructors_must_refuse() -> None:
    assert len(MISUSES) > 50
    assert {name for name, _, _ in MISUSES.values()} >= {
        *NORMS,
        "CrossEntropyLoss",
        "LinearCrossEntropyLoss",
        "LogProb",
        "Sinkhorn",
        "SwiGLU",
    }


@pytest.mark.parametrize("case", MISUSES)
def test_a_constructor_refuses_what_its_op_refuses_in_the_same_words(case: str) -> None:
    name, misuse, options = MISUSES[case]
    kind = CLASSES[name]
    # Without a weight, as the calls of these misuses are.
    if "without a weight" in misuse.message:
        options = {**options, "elementwise_affine": False}
    with pytest.raises(misuse.error) as caught:
        made(kind, **options)
    assert type(caught.value) is misuse.error
    # A message may have the shape of another tensor.
    assert str(caught.value).partition(" x (")[0] == misuse.message.partition(" x (")[0]


@pytest.mark.parametrize("size", [0, -1, 8.0, "8", True, (4, 8), None], ids=repr)
@pytest.mark.parametrize(("name", "argument"), [(n, a) for n, kind in CLASSES.items() for a in parameters(kind) if a in SIZES])
def test_a_size_is_an_integer_above_zero(name: str, argument: str, size: Any) -> None:
    with pytest.raises(OptionError, match=f"^{name}: {argument} must be .*{re.escape(repr(size))}"):
        made(CLASSES[name], **{argument: size})


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "bias_that_is_none": (lambda: nn.RMSNorm(8, bias=False), OptionError, "RMSNorm: options must be among eps, .*, got 'bias'"),
    "affine_that_is_none": (lambda: nn.ModulatedLayerNorm(8, elementwise_affine=False), OptionError, "ModulatedLayerNorm: options must be"),
    "bias_tensor": (lambda: nn.LayerNorm(8, bias=torch.ones(8)), OptionError, "LayerNorm: bias must be True or False, got Tensor"),
    "bias_of_dyt": (lambda: nn.DyT(8, bias="no"), OptionError, "DyT: bias must be True or False, got 'no'"),
    "packed": (lambda: nn.GatedMLP(8, 8, packed=2), OptionError, "GatedMLP: packed must be True or False, got 2"),
    "offset_text": (lambda: nn.RMSNorm(8, weight_offset="1"), OptionError, "rms_norm: weight_offset must be a finite number, got '1'"),
    "groups": (lambda: nn.GatedRMSNorm(8, group_size=3), OptionError, r"gated_rms_norm: group_size must divide the width of x \(1, 8\)"),
    "group_norm": (lambda: nn.GroupNorm(3, 8), OptionError, "group_norm: num_groups must divide"),
    "group_norm_eps": (lambda: nn.GroupNorm(2, 8, -1.0), OptionError, "group_norm: eps must be a finite number > 0, got -1.0"),
    "width_of_poly_norm": (lambda: nn.PolyNorm(8), TypeError, "takes 1 positional argument but 2 were given"),
    "eps_of_poly_norm": (lambda: nn.PolyNorm(eps=0.0), OptionError, "poly_norm: eps must be a finite number > 0, got 0.0"),
    "alpha": (lambda: nn.DyT(8, alpha="x"), OptionError, "DyT: alpha must be a finite number, got 'x'"),
    "iterations": (lambda: nn.HyperConnection(8, iterations=0), OptionError, "sinkhorn: iterations must be at least 1, got 0"),
    "eps_of_streams": (lambda: nn.HyperConnection(8, eps=0), OptionError, "sinkhorn: eps must be a finite number > 0, got 0"),
    "norm_eps": (lambda: nn.HyperConnection(8, norm_eps=-1), OptionError, "project_streams: eps must be a finite number > 0, got -1"),
    "eps_of_layers": (lambda: nn.AttentionResidual(8, 0), OptionError, "attention_residual: eps must be a finite number > 0, got 0"),
    "base": (lambda: nn.RotaryEmbedding(8, 0), OptionError, "RotaryEmbedding: base must be a finite number > 0, got 0"),
    "option_of_heads": (lambda: nn.QKNormRoPE(8, weight_ofset=1), TypeError, "QKNormRoPE.__init__.* 'weight_ofset'"),
    "cast_of_heads": (lambda: nn.QKNormRoPE(8, cast="bf16"), OptionError, "rms_norm: cast must be one of 'input', 'float32', got 'bf16'"),
    "tensor_of_the_call": (
        lambda: nn.CrossEntropyLoss(weight=torch.ones(3)),
        OptionError,
        "CrossEntropyLoss: weight must be passed in the call, got it in the constructor",
    ),
    "rows": (lambda: nn.AddRMSNorm(8, residual=1), OptionError, "AddRMSNorm: residual must be passed in the call"),
    "position": (lambda: nn.CrossEntropyLoss(-100), TypeError, "CrossEntropyLoss: too many positional arguments"),
    "trained_normalizer": (
        lambda: nn.CrossEntropyLoss(normalizer=torch.ones((), requires_grad=True)),
        OptionError,
        "cross_entropy: normalizer must not require a gradient",
    ),
    "dpo_beta": (lambda: nn.DPOLoss(beta=-1), OptionError, "losses.dpo: beta must be a finite number > 0, got -1"),
    "dpo_variant": (lambda: nn.DPOLoss(variant="x"), OptionError, "losses.dpo: variant must be one of 'sigmoid'"),
    "dpo_variant_number": (lambda: nn.DPOLoss(variant=3), OptionError, "losses.dpo: variant must be one of 'sigmoid', .* got 3"),
    "cpo": (lambda: nn.CPOLoss(nll_weight=-1), OptionError, "losses.cpo: nll_weight must be a finite number ≥ 0, got -1"),
    "simpo": (lambda: nn.SimPOLoss(gamma=-1), OptionError, "losses.simpo: gamma must be a finite number ≥ 0, got -1"),
    "orpo": (lambda: nn.ORPOLoss(averaging="token"), OptionError, "losses.orpo: averaging must be of type Averaging, got 'token'"),
    "kto": (lambda: nn.KTOLoss(beta=0), OptionError, "losses.kto: beta must be a finite number > 0, got 0"),
    "grpo": (lambda: nn.GRPOLoss(variant="bnpo"), OptionError, "losses.grpo: variant must be one of 'grpo'"),
    "grpo_number": (lambda: nn.GRPOLoss(variant=3), OptionError, "losses.grpo: variant must be one of 'grpo', .* got 3"),
    "dr_grpo": (lambda: nn.GRPOLoss(variant="dr-grpo"), OptionError, "losses.grpo: averaging must be"),
    "ppo": (lambda: nn.PPOLoss(clip=0.2), OptionError, "losses.ppo: clip must be of type Clip, got 0.2"),
    "dft": (lambda: nn.DFTLoss(averaging="token"), OptionError, "losses.dft: averaging must be of type Averaging, got 'token'"),
    "topk": (lambda: nn.TopKDistillationLoss(kind="kl"), OptionError, "topk_distillation: kind must be one of 'forward_kl'"),
    "gelu_limit": (
        lambda: nn.GatedMLP(8, 8, activation="gelu", limit=7.0),
        OptionError,
        "GatedMLP: options of activation='gelu' must be among overwrite, got 'limit'",
    ),
    "no_options": (
        lambda: nn.GatedMLP(8, 8, activation="relu_squared", overwrite=True),
        OptionError,
        "GatedMLP: options of activation='relu_squared' must be none, got 'overwrite'",
    ),
    "silu_limit": (lambda: nn.GatedMLP(8, 8, limit=-1), OptionError, "swiglu: limit must be a finite number > 0, got -1"),
    "misspelled": (lambda: nn.GatedMLP(8, 8, limt=7.0), OptionError, "options of activation='silu' .* got 'limt'. Did you mean 'limit'"),
    "unhashable": (lambda: nn.GatedMLP(8, 8, activation=[]), OptionError, r"GatedMLP: activation must be one of .*, got \[\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_of_a_constructor_is_named(case: str) -> None:
    make, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        make()


# -- what they must not refuse


def fails(*_: Any) -> Any:
    pytest.fail("a constructor must not run what a user passes")


TAKEN: dict[str, Callable[[], Any]] = {
    "for_a_call_with_targets": lambda: nn.LinearDivergenceLoss(hard_weight=0.5),
    "for_few_classes": lambda: nn.LinearCrossEntropyLoss(budget=100),
    "for_float64": lambda: nn.LogProb(logits_dtype=torch.float64),
    "for_three_rows": lambda: nn.LogProb(temperature=torch.ones(3)),
    "function_of_the_user": lambda: nn.DPOLoss(variant=fails),
    "entropy": lambda: nn.GRPOLoss(penalty=Penalty(entropy=0.1)),
    "reference_of_another_shape": lambda: nn.GRPOLoss(penalty=Penalty(torch.zeros(4, 7))),
    "sampling_of_another_shape": lambda: nn.PPOLoss(off_policy=OffPolicy(torch.zeros(4, 7))),
    "groups_of_three": lambda: nn.GRPOLoss(averaging=Averaging("group", group_size=3)),
    "inplace": lambda: nn.RoPE(inplace=True),
    "mixture": lambda: nn.TopKDistillationLoss(kind="jsd", beta=0.3),
    "offset_without_rows": lambda: nn.GatedRMSNorm(8, weight_offset=1.0, group_size=2),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_constructor_takes_what_is_right_for_some_tensors(case: str) -> None:
    TAKEN[case]()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_constructor_without_weights_leaves_the_random_numbers_as_they_are(name: str) -> None:
    before = torch.get_rng_state()
    FUNCTIONS[name]()
    if "reduction" in parameters(FUNCTIONS[name]):
        with pytest.raises(OptionError):
            FUNCTIONS[name](reduction="avg")
    assert torch.equal(torch.get_rng_state(), before)


# -- tensors among the options


@pytest.mark.parametrize("move", ["to", "copy", "pickle", "to_empty"])
def test_a_tensor_among_the_options_moves_with_its_module_and_keeps_its_value(move: str) -> None:
    loss = nn.CrossEntropyLoss(normalizer=torch.tensor(4097.0))
    assert loss.state_dict() == {}
    moved = {
        "to": lambda: loss.to("cpu", torch.bfloat16),
        "copy": lambda: copy.deepcopy(loss),
        "pickle": lambda: pickle.loads(pickle.dumps(loss)),
        "to_empty": lambda: loss.to_empty(device="cpu"),
    }[move]()
    logits, target = torch.randn(3, 5), torch.arange(3)
    assert torch.equal(moved(logits, target), cross_entropy(logits, target, normalizer=4097.0))
    assert nn.CrossEntropyLoss(normalizer=torch.tensor(2.0)).to("meta").normalizer.device.type == "meta"


# Options that have a tensor → how they are made from one, and its name.
HOLDERS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "averaging": (lambda value: Averaging("token", count=value), "count"),
    "off_policy": (OffPolicy, "sampling"),
}


@pytest.mark.parametrize(("name", "option"), [(name, o) for name in FUNCTIONS for o in HOLDERS if o in parameters(FUNCTIONS[name])])
def test_a_tensor_in_an_option_moves_with_its_module_and_keeps_its_value(name: str, option: str) -> None:
    make, field = HOLDERS[option]
    module = FUNCTIONS[name](**{option: make(torch.tensor(4097.0))})
    for moved in (module.bfloat16(), module.to_empty(device="cpu"), copy.deepcopy(module)):
        value = getattr(moved.options[option], field)
        assert (value.item(), value.dtype) == (4097.0, torch.float32)
    assert getattr(module.to("meta").options[option], field).device.type == "meta"


def test_every_option_with_a_tensor_is_known() -> None:
    classes = {value for value in vars(losses).values() if dataclasses.is_dataclass(value)}
    found = {c for c in classes for field in dataclasses.fields(c) if "Tensor" in str(field.type)}
    assert found == {type(make(torch.tensor(1.0))) for make, _ in HOLDERS.values()}


def test_a_tensor_among_the_options_is_compiled(device: torch.device) -> None:
    torch._dynamo.reset()
    loss = nn.KTOLoss(baseline=torch.tensor(0.2, device=device))
    policy, desirable = torch.full((2, 3), -1.0, device=device), torch.tensor([True, False], device=device)
    given = {"policy": policy, "reference": 2 * policy, "desirable": desirable, "mask": torch.ones_like(policy).bool()}
    expected = losses.kto(**given, baseline=0.2)[0]
    assert torch.compile(loss, fullgraph=True, backend="eager")(**given)[0].item() == pytest.approx(expected.item())


# -- repr

SHOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "affine": (lambda: nn.LayerNorm(8, elementwise_affine=False), "LayerNorm(8, eps=1e-05, elementwise_affine=False)"),
    "bias": (lambda: nn.LayerNorm(8, bias=False), "LayerNorm(8, eps=1e-05, bias=False)"),
    "dyt": (lambda: nn.DyT(8, bias=False, alpha=0.7), "DyT(8, alpha=0.7, bias=False)"),
    "poly_norm": (lambda: nn.PolyNorm(), "PolyNorm(eps=1e-06)"),
    "streams": (lambda: nn.HyperConnection(8, 2, norm_eps=1e-5), "HyperConnection(8, streams=2, eps=1e-06, norm_eps=1e-05)"),
    "residual": (lambda: nn.AttentionResidual(8, elementwise_affine=False), "AttentionResidual(8, eps=1e-06, elementwise_affine=False)"),
    "rotary": (lambda: nn.RotaryEmbedding(8, interleaved=True), "RotaryEmbedding(8, interleaved=True)"),
    "default": (lambda: nn.CrossEntropyLoss(reduction="mean"), "CrossEntropyLoss()"),
    "number": (lambda: nn.CrossEntropyLoss(normalizer=torch.tensor(3.0)), "CrossEntropyLoss(normalizer=tensor(3.))"),
    "tensor": (lambda: nn.LogProb(temperature=torch.ones(3)), "LogProb(temperature=Tensor(3,))"),
}


@pytest.mark.parametrize("case", SHOWN)
def test_a_module_shows_what_it_was_made_with(case: str) -> None:
    make, shown = SHOWN[case]
    assert str(make()) == shown


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("GroupNorm", "Embedding")])
def test_the_arguments_that_a_module_shows_make_the_same_module(name: str) -> None:
    kind = CLASSES[name]
    numbers = {key: p.default / 2 for key, p in parameters(kind).items() if type(p.default) is float and key in ("eps", "beta", "gamma")}
    module = made(kind, **numbers)
    again = eval(f"kind({module.extra_repr()})", {"kind": kind})
    assert str(again) == str(module)
    assert again.arguments == module.arguments
    assert set(module.arguments) >= {key for key, p in parameters(kind).items() if p.default is p.empty}
