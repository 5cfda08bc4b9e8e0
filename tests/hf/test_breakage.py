# SPDX-License-Identifier: Apache-2.0
"""What is known to break when models are patched: one fact each, from threads of users; other files go into them."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

import liger_hf
from hf import two_ranks
from hf.tiny_models import VOCABULARY, make, pair, step, step_disagreements, tokens, twin

pytestmark = pytest.mark.cpu


def test_logits_to_keep_is_honoured_while_training() -> None:
    patched, plain = pair()
    ids, keep = tokens()["input_ids"], 5
    labels = ids[:, -keep:].contiguous()
    inputs = {"input_ids": ids, "labels": labels, "shift_labels": labels, "logits_to_keep": keep}
    assert patched(**inputs).logits.shape == (2, keep, VOCABULARY)
    assert step_disagreements(patched, plain, **inputs) == {}


@pytest.mark.slow
@pytest.mark.parametrize("items", [None, 13, 13.0, torch.tensor(13)], ids=["mean", "int", "float", "tensor"])
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_items_of_an_accumulated_batch_and_shifted_labels_count_as_in_the_plain_loss(items: Any, shifted: bool) -> None:
    patched, plain = pair()
    inputs: dict[str, Any] = tokens()
    if shifted:
        inputs["shift_labels"] = inputs["labels"].roll(-3, 1)
    if items is not None:
        inputs["num_items_in_batch"] = items
    assert step_disagreements(patched, plain, **inputs) == {}


def test_items_of_an_accumulated_batch_may_be_a_vector_of_one_number() -> None:
    results, expected = (model(**tokens(), num_items_in_batch=torch.tensor([13])).loss for model in pair())
    torch.testing.assert_close(results.reshape(()), expected.reshape(()))


def test_replicas_of_data_parallel_are_refused_with_a_sentence() -> None:
    # What DataParallel does to a model for more than one GPU.
    patched, plain = pair()
    plain._replicate_for_data_parallel()
    message = r"one process per GPU, .*DataParallel .*; start with torchrun or accelerate launch"
    with pytest.raises(liger_hf.ModelError, match=message):
        patched._replicate_for_data_parallel()
    patched.liger_report.undo()
    patched._replicate_for_data_parallel()


def fsdp1(rank: int) -> None:
    with two_ranks.one_of_ranks(rank):
        model = make(tie_word_embeddings=False).train()
        expected = step(twin(model), **tokens())["loss"]
        liger_hf.apply(model)
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        loss = wrapped(**tokens()).loss
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
        assert sum(float(p.grad.abs().sum()) for p in wrapped.parameters() if p.grad is not None) > 0


@pytest.mark.slow
def test_fsdp1_has_the_whole_head_within_the_forward() -> None:
    two_ranks.on_two_ranks(fsdp1)


def test_norms_one_after_the_other_do_not_overwrite_what_a_backward_needs() -> None:
    # Gemma 2 norms what it adds to the residual, which was normed before.
    patched, _ = pair("gemma2")
    once = step(patched, **tokens())
    patched.zero_grad()
    loss = patched(**tokens()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in patched.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-5, atol=1e-7)
