# SPDX-License-Identifier: Apache-2.0
"""Every way to write a rotary function is either computed by `rope` or left alone."""

import copy
import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

import liger_hf
from hf.sweep import build
from hf.tiny_configs import tiny_config
from hf.tiny_models import recorded
from liger_hf.rules.rotary import forms as rotary_forms
from liger_hf.rules.rotary import method
from liger_hf.rules.rotary import rule as rotary
from liger_hf.verification import Decision, decide

pytestmark = pytest.mark.cpu

WIDTH = 16
# Modeling file → the function that it has, and the form in which `rope` computes it.
FORMS = {
    **dict.fromkeys(("llama", "gpt_neox", "olmo2", "gemma4"), ("apply_rotary_pos_emb", "")),
    **dict.fromkeys(("qwen2_vl", "minimax_m3_vl"), ("apply_rotary_pos_emb_vision", "")),
    **dict.fromkeys(("deepseek_v2", "llama4"), ("apply_rotary_emb", "complex")),
    "cohere": ("apply_rotary_pos_emb", "interleaved=True"),
    "glm4": ("apply_rotary_pos_emb", "interleaved=True, first half of the tables"),
    "gptj": ("apply_rotary_pos_emb", "interleaved=True, half a table"),
    "gpt_oss": ("apply_rotary_pos_emb", "half a table"),
    "nanochat": ("apply_rotary_pos_emb", "turned the other way"),
    "deepseek_v3": ("apply_rotary_pos_emb_interleave", "from pairs to halves"),
    "deepseek_v4": ("apply_rotary_pos_emb", "interleaved=True, half a table, last columns"),
}


def function_of(family: str, name: str = "apply_rotary_pos_emb") -> Callable[..., Any]:
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)


def decision(function: Callable[..., Any]) -> tuple[Decision, type[nn.Module]]:
    """What becomes of a module that calls the function, which takes what the function takes."""
    space: dict[str, Any] = {"nn": nn, "apply_rotary": function}
    forward = "def forward(self, *args, **options): return apply_rotary(*args, **options)"
    exec(f"class Attention(nn.Module):\n    head_dim = {WIDTH}\n    {forward}\n", space)
    found = rotary.look(space["Attention"]())
    return (decide(found, True) if found.refusal is None else Decision(None, found.refusal)), space["Attention"]


def patched(function: Callable[..., Any]) -> nn.Module:
    chosen, kind = decision(function)
    module = kind()
    for patch in chosen.candidate.install(module):
        patch.install()
    return module


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("family", FORMS)
def test_each_way_to_write_it_is_known(family: str) -> None:
    name, form = FORMS[family]
    chosen, _ = decision(function_of(family, name))
    assert chosen.reason.removeprefix("outputs and gradients agree").removeprefix(", ") == form


def rotated_images(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first columns of the patches of images, as MiniMax M3 VL does in Transformers 5.17."""
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]

    def rotated(x: Tensor) -> Tensor:
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        one, other = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-other, one], -1) * sin, rest], -1)

    return rotated(q), rotated(k)


LLAMA, VISION = function_of("llama"), function_of("qwen2_vl", "apply_rotary_pos_emb_vision")
# A function, whether it is given the axis of the heads, shapes of queries, keys and tables, and calls of the op.
CALLS: dict[str, tuple[Any, ...]] = {
    "packed_images": (VISION, None, (5, 4, WIDTH), (5, 4, WIDTH), (5, WIDTH), 1),
    "packed_sequences": (LLAMA, 1, (5, 4, WIDTH), (5, 2, WIDTH), (5, WIDTH), 1),
    "images_that_share_tables": (rotated_images, None, (2, 5, 4, WIDTH), (2, 5, 4, WIDTH), (5, WIDTH // 2), 1),
    "heads_first": (function_of("pixtral"), 0, (2, 4, 5, WIDTH), (2, 4, 5, WIDTH), (5, WIDTH), 1),
    # No batch, and heads before tokens, which was not tried.
    "heads_first_without_a_batch": (LLAMA, 0, (4, 5, WIDTH), (4, 5, WIDTH), (5, WIDTH), 0),
    "heads_before_tokens": (LLAMA, 1, (2, 4, 5, WIDTH), (2, 2, 5, WIDTH), (2, 5, WIDTH), 1),
    "heads_after_tokens": (LLAMA, 2, (2, 5, 4, WIDTH), (2, 5, 2, WIDTH), (2, 5, WIDTH), 1),
    # It takes whole tables only; a part would rotate too little without a word.
    "a_width_that_was_not_tried": (LLAMA, None, (1, 2, 5, WIDTH), (1, 2, 5, WIDTH), (1, 5, 1), 0),
    "any_part_where_parts_work": (function_of("gpt_neox"), None, (1, 2, 5, WIDTH), (1, 2, 5, WIDTH), (1, 5, 6), 1),
}


@pytest.mark.parametrize(("function", "axis", "of_q", "of_k", "of_table", "calls"), CALLS.values(), ids=CALLS)
def test_calls_are_computed_by_the_op_where_it_was_tried_and_by_the_original_elsewhere(
    function: Any, axis: int | None, of_q: Any, of_k: Any, of_table: Any, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, made = patched(function), recorded(monkeypatch, rotary_forms, "rope")
    q, k, cos, sin = tensors(of_q, of_k, of_table, of_table)
    options = {} if axis is None else {"unsqueeze_dim": axis}
    expected = function(q, k, cos, sin, **options)
    torch.testing.assert_close(module(q, k, cos, sin, **options), expected, rtol=0, atol=1e-6 if calls else 0)
    assert len(made) == calls


def test_the_last_columns_are_rotated_where_the_function_does(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = patched(function_of("deepseek_v4")), recorded(monkeypatch, rotary_forms, "rope")
    x, cos, sin = tensors((1, 2, 5, WIDTH), (1, 5, 3), (1, 5, 3))
    torch.testing.assert_close(module(x, cos, sin), function_of("deepseek_v4")(x, cos, sin))
    assert len(calls) == 1


MULTIMODAL = {"qwen2_vl": "Qwen2VLTextModel", "qwen2_5_vl": "Qwen2_5_VLTextModel", "glm4v": "Glm4vTextModel"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), MULTIMODAL.items(), ids=MULTIMODAL)
def test_every_row_of_multimodal_positions_reaches_the_rotation(family: str, kind: str) -> None:
    """Patched models in which one row of (3, batch, tokens) is read are right for text, whose rows are equal."""
    torch.manual_seed(0)
    model = function_of(family, kind)(tiny_config(f"{family}_text")).double().eval()
    ids, positions = torch.randint(3, 20, (2, 7)), torch.randint(9, (3, 2, 7))
    changed = [positions.clone() for _ in range(3)]
    for row, each in enumerate(changed):
        each[row] = each[row].flip(-1) + 1

    def states() -> list[Tensor]:
        with torch.no_grad():
            return [model(input_ids=ids, position_ids=each).last_hidden_state for each in (positions, *changed)]

    expected = states()
    report = liger_hf.apply(model)
    assert report.replaced["rope"] == model.config.num_hidden_layers, report
    first, *others = ours = states()
    # Angles are computed in float32.
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert [float((first - other).abs().max()) > 1e-4 for other in others] == [True] * 3


def test_a_function_of_other_arguments_is_left_alone() -> None:
    chosen, _ = decision(lambda states, angles: states * angles)
    assert chosen.reason == "it calls apply_rotary, whose arguments are not queries, keys and their angles"


def test_one_tensor_of_two_is_optional() -> None:
    module = patched(function_of("qwen4_exp"))
    q, cos, sin = tensors((1, 2, 5, WIDTH), (1, 5, WIDTH), (1, 5, WIDTH))
    assert torch.equal(module(q, cos=cos, sin=sin), function_of("qwen4_exp")(q, cos=cos, sin=sin))


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("olmo2", torch.bfloat16)])
def test_tables_of_another_dtype_give_the_dtype_of_the_original(family: str, dtype: torch.dtype) -> None:
    module = patched(function_of(family))
    q, k = tensors((1, 2, 5, WIDTH), (1, 2, 5, WIDTH), dtype=torch.bfloat16)
    cos, sin = tensors((1, 5, WIDTH), (1, 5, WIDTH))
    assert [r.dtype for r in module(q, k, cos, sin)] == [dtype, dtype]


def test_a_table_that_requires_a_gradient_gets_it() -> None:
    module = patched(function_of("llama"))
    q, k, cos, sin = tensors((1, 2, 5, WIDTH), (1, 2, 5, WIDTH), (1, 5, WIDTH), (1, 5, WIDTH))
    cos.requires_grad_()
    module(q, k, cos, sin)[0].sum().backward()
    assert cos.grad is not None


class Turning(nn.Module):
    """A rotation as RoFormer writes it, by a static method."""

    head_dim = WIDTH

    def forward(self, table: Tensor, *states: Tensor) -> Any:
        return self.apply_rotary(table, *states)

    @staticmethod
    def apply_rotary(table: Tensor, q: Tensor, k: Tensor, v: Tensor | None = None) -> Any:
        return RoFormerSelfAttention.apply_rotary_position_embeddings(table, q, k, v)


@pytest.mark.parametrize("count", [2, 3])
def test_a_static_method_is_replaced(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Turning()
    report = liger_hf.apply(module)
    assert report.replaced == {"rope": 1}
    calls = recorded(monkeypatch, method, "rope")
    table, *states = tensors((1, 1, 5, WIDTH), *[(2, 4, 5, WIDTH)] * count)
    expected = Turning()(table, *states)
    for twin in (module, copy.deepcopy(module)):
        calls.clear()
        torch.testing.assert_close(twin(table, *states), expected)
        assert len(calls) == count - 1
    assert type(pickle.loads(pickle.dumps(module))) is Turning
    report.undo()
    calls.clear()
    torch.testing.assert_close(module(table, *states), expected, rtol=0, atol=0)
    assert calls == []


def test_calls_of_a_static_method_that_the_op_does_not_compute_go_to_it() -> None:
    module = Turning()
    liger_hf.apply(module)
    table, q, k = tensors((2, 1, 5, WIDTH), (2, 4, 5, WIDTH), (2, 4, 5, WIDTH))
    assert torch.equal(module(table, q, k)[1], Turning()(table, q, k)[1])


def test_a_method_of_other_arguments_and_a_function_of_other_words_are_left_with_a_reason() -> None:
    class Bound(nn.Module):
        def forward(self, x: Tensor, angles: Tensor) -> Tensor:
            return self._apply_rotary_embedding(x, angles)

        def _apply_rotary_embedding(self, x: Tensor, angles: Tensor) -> Tensor:
            return x * angles

    assert [row.reason for row in liger_hf.apply(Bound()).rows] == [
        "it calls _apply_rotary_embedding, a method, whose arguments are not a table of angles, queries and keys"
    ]
    rows = liger_hf.inspect(build("vision:llama4"), only=["rope"], verify=False).rows
    assert [row.reason for row in rows if row.module == "Llama4VisionAttention"] == [
        "it calls vision_apply_rotary_emb, whose arguments are not queries, keys and their angles"
    ]
