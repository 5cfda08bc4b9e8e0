# SPDX-License-Identifier: Apache-2.0
"""Logits of a Trainer's evaluation are a tensor in every use, and cost nothing until the first."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf.tiny_models import make, no_logits, pair_of, tokens
from liger_hf.rules.head.deferred_logits import DeferredLogits

USES: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda x: x.detach(),
    "numpy": lambda x: torch.from_numpy(x.cpu().numpy()),
    "slice": lambda x: x[:, -1],
    "cast": lambda x: x.float() + 0,
    "cat": lambda x: torch.cat([x, x]),
    "loss": lambda x: nn.functional.cross_entropy(x.flatten(0, 1), tokens()["input_ids"].flatten()),
    "write": lambda x: torch.zeros(x.shape).copy_(x),
    "in_place": lambda x: x.mul_(2),
    "list": lambda x: torch.tensor(x.tolist()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": lambda x: copy.deepcopy(x),
    "dlpack": lambda x: torch.from_dlpack(x),
    "beside_another": lambda x: torch.ones(()) * x,
}


def outputs_of(model: Any) -> Any:
    with torch.no_grad():
        return model(**tokens(), num_items_in_batch=torch.tensor(17))


@pytest.fixture
def pair() -> tuple[Any, Any]:
    return pair_of(make().eval())


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_deferred_logits_are_those_of_the_unpatched_model_in_every_use(
    use: Callable[[Tensor], Any], pair: tuple[Any, Any]
) -> None:
    patched, plain = pair
    logits = outputs_of(patched).logits
    assert type(logits) is DeferredLogits
    result, expected = use(logits), use(outputs_of(plain).logits)
    assert type(result) is Tensor
    assert result.dtype == expected.dtype
    # As exact as the model computed, whatever the use casts them to.
    torch.testing.assert_close(result.to(logits.dtype), expected.to(logits.dtype))


def test_what_is_known_of_deferred_logits_computes_nothing(pair: tuple[Any, Any]) -> None:
    with no_logits():
        logits, expected = (outputs_of(model).logits for model in pair)
        assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
        assert isinstance(logits.float(), Tensor)


def test_only_a_trainer_gets_deferred_logits(pair: tuple[Any, Any]) -> None:
    patched, _ = pair
    with torch.no_grad():
        assert type(patched(**tokens()).logits) is Tensor
        assert type(patched(**tokens(), num_items_in_batch=17, keep_logits=True).logits) is Tensor
        assert type(patched(tokens()["input_ids"], num_items_in_batch=17).logits) is Tensor
