# SPDX-License-Identifier: Apache-2.0
"""The attention of `liger verify` for parts of sequences is that of Transformers, and refuses arguments without a
meaning there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core.errors import OptionError
from liger_verify import attention
from liger_verify.batches import batches

ROWS, HEADS, TOKENS, WIDTH = 2, 4, 16, 8


def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    (batch,) = batches(1, ROWS, TOKENS, 50, 0)
    with attention.of_batch(batch, slice(0, TOKENS), None):
        output, _ = attention.attention(SimpleNamespace(), query, key, value, mask, **options)  # type: ignore[arg-type]
    return output


def drawn() -> list[Tensor]:
    return [torch.randn(ROWS, heads, TOKENS, WIDTH) for heads in (HEADS, 2, 2)]


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma2"])
def test_it_is_the_eager_attention_of_transformers(kind: str) -> None:
    modeling = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["eager_attention_forward"])
    (batch,) = batches(1, ROWS, TOKENS, 50, 0)
    seen = torch.ones(TOKENS, TOKENS).tril().bool() & (batch.documents[:, :, None] == batch.documents[:, None, :])
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    sinks = torch.randn(HEADS)
    of_kind: dict[str, Any] = {"gpt_oss": {"s_aux": sinks}, "gemma2": {"softcap": 2.0}}.get(kind, {})
    options = {"scaling": 0.3, "dropout": 0.0, **of_kind}
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=True, config=SimpleNamespace())
    inputs = drawn()
    expected, _ = modeling.eager_attention_forward(module, *inputs, mask, **options)
    torch.testing.assert_close(run(*inputs, **options), expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"indices": torch.zeros(1)}, "attention must have no indices, SimpleNamespace passes one; leave out cp"),
        ({"position_bias": torch.zeros(1)}, "attention must have no position_bias,"),
        ({"mask": torch.zeros(1)}, "attention must have no attention_mask,"),
        ({"dropout": 0.1}, "attention must have no dropout,"),
        ({"is_causal": False}, "attention must be causal, that of SimpleNamespace is not; leave out cp"),
    ],
    ids=["indices", "position_bias", "attention_mask", "dropout", "is_causal"],
)
def test_an_argument_that_it_does_not_know_is_refused_by_name(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=f"verify: with cp, {sentence}"):
        run(*drawn(), **options)


def test_arguments_that_change_nothing_are_ignored() -> None:
    inputs = drawn()
    options = {
        "position_ids": torch.arange(TOKENS),
        "output_attentions": True,
        "indices": None,
        "num_items_in_batch": torch.ones(()),
    }
    assert torch.equal(run(*inputs, **options), run(*inputs))
