# SPDX-License-Identifier: Apache-2.0
"""Lazy logits give the values that plain logits would, whatever is done with them."""

import copy
import io
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_hf
import liger_hf.rules.head.causal_loss
from hf.sweep import build
from hf.test_logits_gradients import TARGET, results
from hf.tiny_models import VOCABULARY, LargestResult, make, pair_of, step_disagreements, tokens, twin
from liger_hf.rules.head.rule import patches

pytestmark = pytest.mark.cpu


@pytest.fixture(params=["llama", "gemma2", "granite"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A plain and a patched model in training."""
    patched, plain = pair_of(make(request.param).train(), only=["linear_cross_entropy"])
    return plain, patched


USES: dict[str, Callable[[Any], Any]] = {
    "last_token": lambda z: z[:, -1] + 0,
    "ellipsis": lambda z: z[..., :-1, :] + 0,
    "some_classes": lambda z: z[..., 3:7],
    "mask": lambda z: z[torch.tensor([True, False])],
    "argmax": lambda z: z.argmax(-1),
    "view": lambda z: z.view(-1, VOCABULARY),
    "cat": lambda z: torch.cat([z, z], dim=1),
    "add": lambda z: 1 + z + 1,
    "subtract": lambda z: 1 - z,
    "multiply": lambda z: (2 * z * 3) + 0,
    "divide": lambda z: (z / 3) + 0,
    "matmul": lambda z: z @ torch.ones(VOCABULARY, 2),
    "compare": lambda z: z > 0,
    "scale_then_cap": lambda z: torch.tanh(z * 0.5) * 4 + 0,
    "cast": lambda z: z.double() * 1.5 + 0,
    "cast_and_back": lambda z: z.to(torch.bfloat16).float() + 0,
    "iterate": lambda z: torch.stack(list(z)),
    "detach": lambda z: z.detach(),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "bias": lambda z: (torch.arange(VOCABULARY) * 0.01 + z * 2 + torch.ones(1, 1, VOCABULARY)) * 2 + 0,
    "reshape": lambda z: z.reshape((22, -1)) + 0,
    "regroup": lambda z: z.view(11, 2, VOCABULARY) + 0,
    "split_classes": lambda z: z.view(2, 11, 3, 100) + 0,
    "flatten": lambda z: z.flatten(0, 1) + 0,
    "flatten_all": lambda z: z.flatten(),
    "cross_entropy_ignoring": lambda z: F.cross_entropy(z.view(-1, VOCABULARY), TARGET, ignore_index=7),
    "cross_entropy_module": lambda z: torch.nn.CrossEntropyLoss()(z[..., :-1, :].contiguous().view(-1, VOCABULARY), TARGET[2:]),
    "cross_entropy_weighted": lambda z: F.cross_entropy(z.flatten(0, 1), TARGET, weight=torch.arange(1.0, VOCABULARY + 1)),
    "cross_entropy_per_token": lambda z: F.cross_entropy(z.transpose(1, 2), TARGET.view(2, 11), reduction="none"),
    "cross_entropy_with_probabilities": lambda z: F.cross_entropy(z.flatten(0, 1), torch.full((22, VOCABULARY), 1 / VOCABULARY)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_use_of_logits_gives_the_plain_values(pair: tuple[Any, Any], use: Callable[[Any], Any]) -> None:
    plain, patched = pair
    got, expected = (use(model(**tokens()).logits) for model in (patched, plain))
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_the_logits_while_training_are_lazy_and_known_by_shape(pair: tuple[Any, Any]) -> None:
    logits = pair[1](**tokens()).logits
    assert isinstance(logits, liger_hf.LazyLogits)
    sizes = (logits.shape, logits.size(-1), logits.ndim, logits.numel(), len(logits))
    assert sizes == ((2, 11, VOCABULARY), VOCABULARY, 3, 22 * VOCABULARY, 2)
    assert (logits.dtype, logits.device, logits.requires_grad) == (torch.float32, torch.device("cpu"), True)
    assert "LazyLogits(shape=(2, 11, 300)" in repr(logits)
    assert logits.real is None


@pytest.mark.parametrize("model_type", ["opt", "bert", "bart", "xlm", "electra"])
def test_a_loss_that_the_model_computes_itself_reads_no_logits(model_type: str) -> None:
    model = build(model_type).train()
    liger_hf.apply(model, only=["linear_cross_entropy"])
    ids = tokens()["input_ids"]
    with LargestResult() as lean, pytest.MonkeyPatch.context() as patch:
        patch.setattr("liger_core.ops.head.loop.CPU_BYTES", 4 * VOCABULARY * 4)
        logits = model(input_ids=ids.repeat(1, 4), labels=ids.repeat(1, 4)).logits
    assert logits.real is None
    # 88 tokens: more than the largest weight has rows.
    assert lean.elements < 88 * VOCABULARY


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.2}, {"reduction": "sum"}, {"reduction": "sum", "label_smoothing": 0.2}],
    ids=str,
)
def test_cross_entropy_of_the_logits_that_a_step_returned_makes_none(
    pair: tuple[Any, Any], options: dict[str, Any]
) -> None:
    losses = []
    for model in pair:
        logits = model(**tokens()).logits
        losses.append(F.cross_entropy(logits.view(-1, VOCABULARY), TARGET, **options))
    torch.testing.assert_close(*losses)
    assert logits.real is None


def test_moving_to_another_device_waits_until_they_are_computed(pair: tuple[Any, Any]) -> None:
    # As accelerate does with the outputs of a model on several devices.
    patched = pair[1]
    outputs = patched(**tokens())
    moved = send_to_device(outputs, torch.device("meta"), non_blocking=True).logits
    assert isinstance(moved, liger_hf.LazyLogits)
    assert (moved.device.type, moved.float().device.type, moved.real) == ("meta", "meta", None)
    loss = F.cross_entropy(outputs.logits.to("meta").view(-1, VOCABULARY), TARGET)
    assert loss.device.type == "meta"
    assert outputs.logits.real is None
    assert moved.materialize().device.type == "meta"


def test_a_tuple_is_returned_where_one_is_asked_for(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    got, expected = (model(**tokens(), return_dict=False) for model in (patched, plain))
    assert len(got) == len(expected)
    torch.testing.assert_close(got[1] + 0, expected[1])


def test_logits_to_keep_with_labels_that_do_not_fit_is_the_error_of_the_unpatched_model(pair: tuple[Any, Any]) -> None:
    messages = []
    for model in pair:
        with pytest.raises(ValueError, match="batch_size") as error:
            model(**tokens(), logits_to_keep=2)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_another_ignore_index_is_honoured(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    inputs = tokens()
    inputs["labels"] = inputs["labels"].clamp(min=7)
    got, expected = (model(**inputs, ignore_index=7).loss for model in (patched, plain))
    torch.testing.assert_close(got, expected)


def test_a_batch_without_a_counted_label_has_loss_and_gradients_zero(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    inputs = tokens()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    assert plain(**inputs).loss.isnan()
    loss = patched(**inputs).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(bool((p.grad == 0).all()) for p in patched.parameters() if p.grad is not None)


def test_without_labels_logits_are_a_tensor_and_the_loss_function_says_what_is_missing(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    outputs = patched(tokens()["input_ids"])
    assert outputs.loss is None
    assert isinstance(outputs.logits, Tensor)
    assert torch.equal(outputs.logits, plain(tokens()["input_ids"]).logits)
    message = "labels or shift_labels must be given, got neither; call the model with labels=input_ids"
    with pytest.raises(liger_hf.LogitsError, match=message):
        patched.loss_function(torch.zeros(2, 11, VOCABULARY), None, VOCABULARY)


def test_logits_are_a_tensor_on_request_and_in_evaluation_with_gradients(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    assert torch.equal(patched(**tokens(), keep_logits=True).logits, plain(**tokens()).logits)
    plain.eval(), patched.eval()
    assert torch.equal(patched(**tokens()).logits, plain(**tokens()).logits)


def test_the_head_is_itself_again_after_a_forward_that_failed(pair: tuple[Any, Any]) -> None:
    patched = pair[1]
    with pytest.raises((ValueError, TypeError)):
        patched(input_ids=None, inputs_embeds=None)
    assert isinstance(patched.lm_head(torch.randn(3, 64)), Tensor)


def saved_and_loaded(logits: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.slow
@pytest.mark.parametrize("way", [lambda z: pickle.loads(pickle.dumps(z)), saved_and_loaded, copy.deepcopy])
def test_outputs_can_be_stored(pair: tuple[Any, Any], way: Callable[[Any], Tensor]) -> None:
    plain, patched = pair
    outputs, expected = patched(**tokens()), plain(**tokens()).logits
    assert torch.equal(way(outputs.logits), expected.detach())


WRITES: dict[str, Callable[[Any], Any]] = {
    "assignment": lambda z: z.__setitem__((0, 0), 0.0),
    "method": lambda z: z.add_(1.0),
    "operator": lambda z: operator.itruediv(z, 2.0),
    "mask": lambda z: z.masked_fill_(torch.ones(2, 11, 1, dtype=torch.bool), 0.0),
    "slice": lambda z: z[:, -1].zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writing_into_lazy_logits_is_an_error(pair: tuple[Any, Any], write: Callable[[Any], Any]) -> None:
    message = r"must not change logits that are computed on demand.*take a copy with logits\.clone\(\)"
    with pytest.raises(liger_hf.LogitsError, match=message):
        write(pair[1](**tokens()).logits)


def test_vmap_takes_the_logits_themselves(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    logits = patched(**tokens()).logits
    with pytest.raises(ValueError, match="LazyLogits"):
        torch.vmap(torch.sum)(logits)
    torch.testing.assert_close(*(torch.vmap(torch.sum)(z) for z in (logits.materialize(), plain(**tokens()).logits)))


def test_logits_are_computed_without_the_autocast_of_where_they_are_read(pair: tuple[Any, Any]) -> None:
    plain, patched = pair
    outputs = patched(**tokens())
    with torch.autocast("cpu", torch.bfloat16):
        logits = outputs.logits + 0
    assert torch.equal(logits, plain(**tokens()).logits)


def test_reading_after_a_cast_of_the_model_is_an_error(pair: tuple[Any, Any]) -> None:
    patched = pair[1]
    outputs = patched(**tokens())
    patched.to(torch.bfloat16)
    with pytest.raises(liger_hf.LogitsError, match="has been cast or moved since the forward pass"):
        outputs.logits.argmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["smoothed", "plain"])
@pytest.mark.parametrize("read", [False, True], ids=["alone", "read_too"])
def test_a_loss_function_may_be_checkpointed(pair: tuple[Any, Any], loss: str, read: bool) -> None:
    smoothing = 0.1 if loss == "smoothed" else 0.0

    def of_logits(logits: Any, labels: Tensor) -> Tensor:
        rows = logits[:, :-1].reshape(-1, VOCABULARY).float()
        return F.cross_entropy(rows, labels[:, 1:].reshape(-1), label_smoothing=smoothing)

    def total(outputs: Any) -> Tensor:
        if not read:
            return outputs.loss
        outputs.logits.argmax(-1)
        return outputs.loss + outputs.logits.square().mean()

    found = []
    for model in pair:
        model.loss_function = lambda logits, labels, *_, **__: checkpoint(
            of_logits, logits, labels, use_reentrant=False
        )
        found.append(results(model, total))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_forward_that_writes_into_its_logits_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden) * 2
        logits[..., :5] = -50.0
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    plain = make().train()
    patched = twin(plain)
    reason = next(row.reason for row in liger_hf.apply(patched).rows if row.op == "linear_cross_entropy")
    assert "it reads them itself" in reason
    for patch in patches(patched, patched.lm_head):
        patch.install()
    got, expected = patched(**tokens()), plain(**tokens())
    torch.testing.assert_close((got.loss, got.logits + 0), (expected.loss, expected.logits))


@dataclass
class TwoLogits(CausalLMOutputWithPast):
    next_logits: Any = None
    unused_logits: Any = None


def test_logits_beside_the_first_ones_are_treated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits, next_logits, unused = self.lm_head(hidden), self.lm_head(hidden * 2), self.lm_head(hidden * 3)
        size = self.config.vocab_size
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, size) + self.loss_function(next_logits, labels, size)
        return TwoLogits(loss=loss, logits=logits, next_logits=next_logits, unused_logits=unused)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    patched, plain = pair_of(make().train())
    assert patched.liger_report.replaced["linear_cross_entropy"] == 1
    expected = plain(**tokens())
    for outputs in (patched(**tokens(), keep_logits=True), patched(**tokens())):
        for name, value in expected.items():
            torch.testing.assert_close(outputs[name] + 0, value)
            assert getattr(outputs, name) is outputs[name]
    assert isinstance(patched(**tokens(), keep_logits=True).next_logits, Tensor)
    outputs = patched(**tokens())
    assert isinstance(outputs.unused_logits, Tensor)
    outputs.loss.backward()
    torch.optim.SGD(patched.parameters(), lr=1.0).step()
    with pytest.raises(liger_hf.LogitsError, match="has been updated"):
        outputs.next_logits.sum()


def test_steps_that_the_op_does_not_know_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Tensor, labels: Tensor, **options: Any) -> Any:
        logits = torch.tanh(torch.tanh(self.lm_head(self.model(input_ids=input_ids).last_hidden_state))) * 3
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    monkeypatch.setitem(liger_hf.rules.head.causal_loss.CHUNK_ELEMENTS, "cpu", 5 * VOCABULARY)
    patched, plain = pair_of(make().train())
    assert isinstance(patched(**tokens()).logits, liger_hf.LazyLogits)
    assert step_disagreements(patched, plain) == {}
