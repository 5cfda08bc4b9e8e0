# SPDX-License-Identifier: Apache-2.0
"""A sample of the model types that `nox -s sweep` compares, and that the sweep notices what is wrong."""

import pytest
import torch
import transformers

import liger_hf
from hf import sweep
from hf.sweep import ADDED, COLUMNS, COMPOSITES, ON_REQUEST, PAGE, SAME, TYPES, UNBUILT, WRONG
from hf.test_verification import OffBy
from liger_hf.rules.head import causal_loss

pytestmark = pytest.mark.cpu

# One of each way to write a norm, a gated MLP, a rotary function or a head.
SAMPLE = [
    "bamba", "bart", "bert", "bloom", "cohere2", "deepseek_v3", "gemma3_text", "glm4", "gpt2", "gpt_oss", "granitemoe",
    "llama4_text", "olmo2", "phi3", "qwen3_5_text",
]  # fmt: skip


@pytest.mark.slow
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


@pytest.fixture
def page() -> str:
    text = PAGE.read_text()
    if f"of Transformers {transformers.__version__}," not in text:
        pytest.skip(f"docs/models.md is not of Transformers {transformers.__version__}, which may have other types")
    return text


def test_the_page_names_every_type(page: str) -> None:
    assert [name for name in (*TYPES, *COMPOSITES) if f"| {name} |" not in page and f"* {name}: " not in page] == []
    assert f"| {WRONG} |" not in page


def test_a_page_that_was_read_is_written_as_it_was(page: str) -> None:
    assert sweep.page(sweep.read(page)) == page


def test_a_type_that_cannot_be_built_is_distinguished_from_a_wrong_one() -> None:
    result = sweep.check("git")
    assert result.verdict == UNBUILT
    assert "batch_size" in result.raised
    assert result.columns == {}


def test_a_wrong_gradient_of_one_percent_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right, apply = causal_loss.linear_cross_entropy, liger_hf.apply
    wrong = lambda x, *args, **options: right(OffBy.apply(x, 1.01), *args, **options)  # noqa: E731
    monkeypatch.setattr(causal_loss, "linear_cross_entropy", wrong)
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


def test_columns_cover_every_op_that_is_put_into_models() -> None:
    from liger_hf.discovery import replaceable_ops

    assert {op for ops in COLUMNS.values() for op in ops} | {*ADDED, *ON_REQUEST} == set(replaceable_ops())
