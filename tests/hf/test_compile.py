# SPDX-License-Identifier: Apache-2.0
"""A patched model is one graph for torch.compile."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper, wraps
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from transformers import DynamicCache

import liger_hf
from hf.sweep import build
from hf.tiny_models import VOCABULARY, adapted, disagreements, exact_step, make, pair, pair_of, recorded, step, tokens
from liger_hf.patch import replacement
from liger_hf.rules.norm.within import untouched

pytestmark = pytest.mark.usefixtures("kernels_when_compiled")


def forget() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    forget()
    yield
    forget()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def graph_breaks() -> set[str]:
    return set(torch._dynamo.utils.counters["graph_break"])


def compiled_step(model: Any, backend: Any, fullgraph: bool = True, **inputs: Any) -> dict[str, Tensor]:
    """A training step through one compiled graph."""
    return step(torch.compile(model, fullgraph=fullgraph, backend=backend), **inputs)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_patched_model_is_one_graph_with_the_right_gradients_and_logits_that_are_computed_outside(
    architecture: str,
) -> None:
    sizes: list[int] = []

    def watch(graph: fx.GraphModule, inputs: Any) -> Any:
        values = [node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function"]
        sizes.extend(value.numel() for value in values if isinstance(value, Tensor))
        return make_boxed_func(graph)

    patched, plain = pair(architecture)
    # More rows than any weight has, so that a gradient of a weight is not taken for logits.
    inputs = tokens(batch=8, length=50)
    compiled = torch.compile(patched, fullgraph=True, backend=aot_autograd(fw_compiler=watch, bw_compiler=watch))
    results, expected = step(compiled, **inputs), step(plain, **inputs)
    assert disagreements(results, expected, exact_step(plain, **inputs)) == {}
    torch.testing.assert_close(compiled(**inputs).logits + 0, plain(**inputs).logits)
    assert graphs() == 1
    assert not graph_breaks()
    assert VOCABULARY * 64 <= max(sizes) < inputs["input_ids"].numel() * VOCABULARY


@pytest.mark.slow
@pytest.mark.cpu
def test_a_hook_in_a_head_with_an_adapter_breaks_no_graph() -> None:
    patched, plain = pair_of(adapted(make(tie_word_embeddings=False), "lm_head"))
    for model in (plain, patched):
        model.base_model.model.lm_head.lora_A.default.register_forward_hook(lambda module, args, output: output * 2)
    inputs = tokens()
    results = compiled_step(patched, "aot_eager", **inputs)
    assert disagreements(results, step(plain, **inputs), exact_step(plain, **inputs)) == {}


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("model_type", ["opt", "bert", "glm4", "gemma4_text"])
def test_other_heads_and_rotary_functions_break_no_graph(model_type: str) -> None:
    patched, plain = pair_of(build(model_type).train())
    inputs = {**tokens(), "use_cache": False}
    results, breaks = compiled_step(patched, "aot_eager", False, **inputs), graph_breaks()
    torch.testing.assert_close(results, step(plain, **inputs), rtol=1e-4, atol=1e-5)
    if breaks:
        # By reason: a break that the model brings (OPT draws a number) is met in each frame around it.
        forget()
        step(torch.compile(plain, backend="aot_eager"), **inputs)
        assert breaks <= graph_breaks()


# Name → the forward that a norm gets as an instance, and whether it still computes what its class does.
FORWARDS: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {
    "of_its_class": (lambda norm: norm.forward, True),
    "by_apply": (lambda norm: replacement(norm, lambda self, x: x, nn.RMSNorm.forward).value, True),
    "by_apply_for_another_class": (
        lambda norm: replacement(norm, lambda self, x: x, nn.LayerNorm.forward).value,
        False,
    ),
    "another_method": (lambda norm: MethodType(lambda self, x: x, norm), False),
    "a_function": (lambda norm: wraps(norm.forward)(lambda x: x), False),
    "a_partial_function": (lambda norm: update_wrapper(partial(norm.forward), norm.forward), False),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", [None, *FORWARDS])
def test_compiled_code_finds_out_whether_a_norm_has_the_forward_of_its_class(name: str | None) -> None:
    norm = nn.RMSNorm(4)
    make_forward, expected = FORWARDS[name] if name else (None, True)
    if make_forward:
        norm.forward = make_forward(norm)
    assert untouched(norm, nn.RMSNorm.forward) == expected
    compiled = torch.compile(lambda x: x + untouched(norm, nn.RMSNorm.forward), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())) == expected


@pytest.mark.slow
def test_a_patched_model_recompiles_no_more_than_the_plain_one() -> None:
    def count(model: Any) -> list[int]:
        forget()
        compiled, seen = torch.compile(model, backend="eager"), []
        for length in (11, 11, 16, 20):
            compiled(**tokens(length=length)).loss.backward()
            seen.append(graphs())
        return seen

    patched, plain = pair(num_hidden_layers=1)
    assert count(patched) == count(plain)


@pytest.mark.slow
def test_the_compiled_model_evaluates_like_the_plain_one() -> None:
    patched, plain = pair_of(make().eval())
    with torch.no_grad():
        results, expected = torch.compile(patched, fullgraph=True, backend="aot_eager")(**tokens()), plain(**tokens())
    torch.testing.assert_close((results.logits, results.loss), (expected.logits, expected.loss))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "compiled"])
def test_an_exported_model_in_training_returns_its_logits(strict: bool) -> None:
    patched, plain = pair(num_hidden_layers=1)
    inputs = {**tokens(), "use_cache": False}
    results, expected = torch.export.export(patched, (), inputs, strict=strict).module()(**inputs), plain(**inputs)
    torch.testing.assert_close((results.logits, results.loss), (expected.logits, expected.loss))


@pytest.mark.slow
def test_inductor_gives_the_right_gradients(place: torch.device) -> None:
    patched, plain = pair(num_hidden_layers=1)
    inputs = tokens()
    # On a GPU the sums of the kernels have another order than those of the unpatched model.
    atol = 1e-6 if place.type == "cpu" else 1e-5
    torch.testing.assert_close(
        compiled_step(patched, "inductor", **inputs), step(plain, **inputs), rtol=1e-4, atol=atol
    )


def attention_flags(model: Any, **inputs: Any) -> set[bool]:
    """is_causal of every attention call in the compiled graph; the results are those of the model in eager."""
    # With a cache Transformers does not look for packed sequences, and since 5.23 makes no mask either.
    inputs["use_cache"] = False
    found: list[bool] = []

    def note(graph: fx.GraphModule, _: Any) -> Any:
        found.extend(n.kwargs["is_causal"] for n in graph.graph.nodes if "scaled_dot_product" in str(n.target))
        return graph

    eager = model(**inputs).loss
    compiled = torch.compile(model, fullgraph=True, backend=note)(**inputs).loss
    torch.testing.assert_close(compiled, eager)
    assert found
    return set(found)


@pytest.mark.slow
def test_a_compiled_patched_model_needs_no_causal_mask() -> None:
    model = make("llama").train()
    with liger_hf.apply(model) as report:
        on_gpu = next(model.parameters()).is_cuda
        assert ("attention uses is_causal=True, which is faster than a mask" in str(report)) == on_gpu
        assert attention_flags(model, **tokens()) == {True}
    torch._dynamo.reset()
    assert attention_flags(model, **tokens()) == {False}


@pytest.mark.slow
def test_a_patched_model_needs_no_causal_mask_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama").train()
    inputs = tokens() | {"use_cache": False}
    expected = model(**inputs).loss
    flags = recorded(
        monkeypatch,
        nn.functional,
        "scaled_dot_product_attention",
        lambda *args, is_causal, **options: is_causal,
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model(**inputs)
    with liger_hf.apply(model):
        torch.testing.assert_close(model(**inputs).loss, expected)
    assert flags == [False] * 2 + [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_compiled_patched_model_reads_its_cache_in_the_second_chunk_of_a_prefill(architecture: str) -> None:
    model = make(architecture).eval()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = tokens()["input_ids"]
    half = ids.shape[1] // 2
    with torch.no_grad():
        whole = model(ids).logits[:, half:]
        liger_hf.apply(model)
        compiled = torch.compile(model, backend="eager")
        cache = DynamicCache(config=model.config)
        compiled(ids[:, :half], **{name: cache}, use_cache=True)
        second = compiled(ids[:, half:], **{name: cache}, use_cache=True).logits
    torch.testing.assert_close(second, whole, rtol=1e-5, atol=1e-5)


# What a later version or another model may call a cache, a mask or a position is not known here.
@pytest.mark.slow
@pytest.mark.parametrize("given", ["attention_mask", "position_ids", "an_argument_of_tomorrow"])
def test_padding_packing_and_unknown_arguments_keep_their_mask_when_compiled(given: str, place: torch.device) -> None:
    model = make("llama").train()
    liger_hf.apply(model)
    inputs = tokens()
    batch, length = inputs["input_ids"].shape
    if given == "attention_mask":
        inputs[given] = torch.ones(batch, length, dtype=torch.int64, device=place)
        inputs[given][0, :3] = 0
    elif given == "an_argument_of_tomorrow":
        inputs[given] = torch.arange(4)
    else:
        # Two sequences packed into each row.
        inputs[given] = (torch.arange(length, device=place) % (length // 2)).expand(batch, -1)
    assert attention_flags(model, **inputs) == {False}
