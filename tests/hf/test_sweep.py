# SPDX-License-Identifier: Apache-2.0
"""A sample of the model types that `nox -s sweep` compares, and that the sweep notices what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import liger_hf
from hf import sweep
from hf.sweep import ADDED, COLUMNS, COMPOSITES, ON_REQUEST, PAGE, SAME, TYPES, UNBUILT, WRONG
from liger_hf.rebinding import innermost, names_in
from liger_hf.rules.head import causal_loss

pytestmark = pytest.mark.cpu

# One of each way to write a norm, a gated MLP, a rotary function or a head.
SAMPLE = [
    "bamba", "bart", "bert", "blenderbot", "bloom", "cohere2", "deepseek_v3", "ernie4_5", "gemma3_text", "glm4",
    "gpt2", "gpt_oss", "granitemoe", "helium", "llama4_text", "mamba2", "olmo2", "opt", "phi3", "qwen3_5_text",
]  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_patched_model_computes_what_the_unpatched_one_does_and_the_page_shows_what_was_replaced(
    model_type: str,
) -> None:
    result = sweep.check(model_type)
    assert (result.verdict, result.detail) == (SAME, "")
    assert sweep.line(result) in PAGE.read_text().splitlines()


def test_a_relu_at_its_kink_does_not_count_as_a_difference() -> None:
    # With the first weights, one of its inputs is 2e-7, whose sign depends on the order of sums in the norm before it.
    result = sweep.check("seq2seq:switch_transformers")
    assert (result.verdict, result.detail) == (SAME, "")


def test_the_page_names_every_type() -> None:
    page = PAGE.read_text()
    if f"of Transformers {transformers.__version__}," not in page:
        pytest.skip(f"docs/models.md is not of Transformers {transformers.__version__}, which may have other types")
    assert [name for name in (*TYPES, *COMPOSITES) if f"| {name} |" not in page and f"* {name}: " not in page] == []
    assert f"| {WRONG} |" not in page


def test_the_table_of_families_says_what_the_table_of_types_says() -> None:
    text = PAGE.read_text()
    results = sweep.read(text)
    known = {result.model_type for result in results}
    assert [t for types in sweep.FAMILIES.values() for t in types if t not in known] == []
    assert "\n".join(sweep.families(results)) in text


def test_a_page_that_was_read_is_written_as_it_was() -> None:
    text = PAGE.read_text()
    if f"of Transformers {transformers.__version__}," not in text:
        pytest.skip(f"docs/models.md is not of Transformers {transformers.__version__}, which may have other types")
    assert sweep.page(sweep.read(text)) == text


def test_a_type_that_cannot_be_built_is_distinguished_from_a_wrong_one() -> None:
    result = sweep.check("git")
    assert result.verdict == UNBUILT
    assert "batch_size" in result.raised
    assert result.columns == {}


def test_the_page_says_in_words_why_a_type_was_not_compared() -> None:
    unbuilt = [result.detail for result in sweep.read(PAGE.read_text()) if result.verdict == UNBUILT]
    known = [re.escape(words).replace(r"\{\}", r"\w+") for _, words in sweep.NOT_COMPARED]
    assert [detail for detail in unbuilt if not any(re.fullmatch(pattern, detail) for pattern in known)] == []


# What looks like what a column counts, by the words of classes and functions alone; – says that the model has none.
LOOKS_LIKE = {"experts": r"Experts?$", "rope": r"apply_rotary|apply_\w+_rope", "norm": r"Norm$"}


def words_of(model: Any) -> dict[str, set[str]]:
    """Names of classes, and names in the forwards of modules."""
    classes = {type(module).__name__ for module in model.modules()}
    forwards = {
        name
        for module in model.modules()
        for name in names_in(getattr(innermost(type(module).forward), "__code__", (lambda: 0).__code__))
    }
    return {"experts": classes, "norm": classes, "rope": forwards}


@pytest.mark.parametrize(
    "model_type", [*SAMPLE, "aria_text", "dbrx", "jetmoe", "longcat_flash", "roformer", "olmo", "xlnet"]
)
def test_a_dash_says_that_the_model_has_none(model_type: str) -> None:
    (result,) = [result for result in sweep.read(PAGE.read_text()) if result.model_type == model_type]
    words = words_of(sweep.build(model_type))
    for column, pattern in LOOKS_LIKE.items():
        if column not in result.columns:
            assert [word for word in words[column] if re.search(pattern, word)] == []


class Larger(torch.autograd.Function):
    """The identity with a gradient that is a hundredth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1.01


def test_a_wrong_gradient_of_one_percent_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right, apply = causal_loss.linear_cross_entropy, liger_hf.apply
    monkeypatch.setattr(
        causal_loss, "linear_cross_entropy", lambda x, *args, **options: right(Larger.apply(x), *args, **options)
    )
    monkeypatch.setattr(liger_hf, "apply", lambda model: apply(model, verify=False))
    result = sweep.check("llama")
    assert result.verdict == WRONG
    assert "float64, training, gradient of" in result.detail


def test_a_result_that_is_less_accurate_in_float32_alone_is_wrong() -> None:
    true = torch.linspace(1, 2, 50, dtype=torch.float64)
    plain = {"logits": (true * (1 + 2e-7)).float()}
    assert sweep.differences({"logits": (true * (1 + 5e-7)).float()}, {"logits": true}, plain) == []
    (problem,) = sweep.differences({"logits": (true * (1 + 5e-6)).float()}, {"logits": true}, plain)
    assert problem.startswith("float32, logits: error 5.")


def test_a_crash_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_send", crash)
    result = sweep._in_a_process(sweep.multiprocessing.get_context("fork"), "llama")
    assert (result.verdict, result.detail) == (WRONG, "its process ended with exit code 7")


def crash(sender: Any, model_type: str) -> None:
    import os

    os._exit(7)


def test_an_interrupted_sweep_resumes_where_it_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "results.jsonl")
    sweep.RESULTS.write_text('{"key": "now", "model_type": "llama", "verdict": "same"}\n{"key": "now", "model_ty')
    assert list(sweep._known("now")) == ["llama"]
    assert sweep._known("another state of the sources") == {}


def test_columns_cover_every_op_that_is_put_into_models() -> None:
    from liger_hf.discovery import replaceable_ops

    assert {op for ops in COLUMNS.values() for op in ops} | {*ADDED, *ON_REQUEST} == set(replaceable_ops())
