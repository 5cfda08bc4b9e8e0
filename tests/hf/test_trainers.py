# SPDX-License-Identifier: Apache-2.0
"""The heads for verl, prime-rl and Megatron-core in small stand-ins of these trainers, against plain PyTorch."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forks import on_ranks
from liger_core import OptionError
from liger_hf.trainers import FusedLinearForPPO, FusedOutputLinear, output_processor

pytestmark = pytest.mark.cpu
SEQUENCES, TOKENS, WIDTH, CLASSES = 2, 7, 16, 50


class Model(nn.Module):
    """An embedding, a body and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def hidden(self, ids: Tensor) -> Tensor:
        return self.body(self.embedding(ids)).tanh()


def ids() -> Tensor:
    return torch.randint(CLASSES, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))


def following(ids: Tensor) -> Tensor:
    return torch.roll(ids, -1, dims=-1)


def of_logits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, from all the logits."""
    exact = logits.float().log_softmax(-1)
    return exact.gather(-1, target[..., None])[..., 0], -(exact.exp() * exact).sum(-1)


def plain(model: Model, temperature: Tensor | float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    divide = temperature.expand(SEQUENCES, TOKENS)[..., None] if isinstance(temperature, Tensor) else temperature
    return of_logits(scale * model.hidden(ids()) @ model.lm_head.weight.t() / divide, following(ids()))


def gradients(model: nn.Module, results: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Of a loss with both results in it, each token with a weight of its own."""
    weights = torch.randn(2, SEQUENCES, TOKENS, generator=torch.Generator().manual_seed(2))
    loss = sum((w * result.reshape(SEQUENCES, TOKENS)).sum() for w, result in zip(weights, results, strict=True))
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(
    model: nn.Module, results: tuple[Tensor, Tensor], other: nn.Module, expected: tuple[Tensor, Tensor]
) -> None:
    assert [got.dtype for got in results] == [torch.float32] * 2
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(gradients(model, results), gradients(other, expected), rtol=1e-4, atol=1e-5)


PER_TOKEN = torch.linspace(0.4, 1.6, SEQUENCES * TOKENS).reshape(SEQUENCES, TOKENS)
TEMPERATURES: dict[str, Tensor | float] = {
    "number": 0.7,
    "of_each_token": PER_TOKEN,
    "of_each_sequence": PER_TOKEN[:, :1],
}
with_temperatures = pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES.keys())


# -- verl: the forward pass of a model shifts the tokens and calls the head's class with keywords


def verl_forward(model: Model, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    given = {"hidden_states": model.hidden(ids()), "vocab_weights": model.lm_head.weight, "input_ids": following(ids())}
    return FusedLinearForPPO().forward(**given, temperature=temperature)


@with_temperatures
def test_the_head_of_verl_has_the_results_and_gradients_of_plain_pytorch(temperature: Tensor | float) -> None:
    model, other = Model(), Model()
    assert_same(model, verl_forward(model, temperature), other, plain(other, temperature))


def test_the_head_of_verl_takes_packed_tokens_of_any_integer_dtype_and_options_of_the_op() -> None:
    model, other = Model(), Model()
    hidden, target = model.hidden(ids()).flatten(0, 1), following(ids()).flatten().int()
    packed = FusedLinearForPPO(logit_scale=0.5)(hidden, model.lm_head.weight, target, 0.7)
    assert [result.shape for result in packed] == [(SEQUENCES * TOKENS,)] * 2
    expected = plain(other, 0.7, scale=0.5)
    assert_same(model, packed, other, (expected[0].flatten(), expected[1].flatten()))


# -- prime-rl: its layer replaces lm_head, with the same weight, and model(…) returns what the layer returns


class PrimeModel(Model):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        old = self.lm_head
        sizes = {"in_features": old.in_features, "out_features": old.out_features}
        self.lm_head = FusedOutputLinear(**sizes, chunk_size=8192, **options)
        self.lm_head.weight = old.weight

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.lm_head(self.hidden(ids), labels, temperature)
        return found


@pytest.mark.parametrize("temperature", [PER_TOKEN, torch.tensor(0.7)], ids=["of_each_token", "one"])
def test_the_layer_of_prime_rl_has_the_results_and_gradients_of_plain_pytorch(temperature: Tensor) -> None:
    model, other = PrimeModel(), Model()
    found = model(ids(), following(ids()), temperature)
    assert list(found) == ["logprobs", "entropy"]
    assert_same(model, (found["logprobs"], found["entropy"]), other, plain(other, temperature))


def test_the_layer_of_prime_rl_caps_the_logits_of_gemma() -> None:
    model, other = PrimeModel(softcap=3.0), Model()
    found = model(ids(), following(ids()), PER_TOKEN)
    logits = 3.0 * (other.hidden(ids()) @ other.lm_head.weight.t() / 3.0).tanh() / PER_TOKEN[..., None]
    assert_same(model, (found["logprobs"], found["entropy"]), other, of_logits(logits, following(ids())))


@pytest.mark.parametrize("missing", ["labels", "temperature"])
def test_the_layer_of_prime_rl_says_what_is_missing(missing: str) -> None:
    given = {"labels": ids(), "temperature": PER_TOKEN}
    del given[missing]
    message = f"^FusedOutputLinear needs labels and the temperature of each token, got no {missing}$"
    with pytest.raises(OptionError, match=message):
        PrimeModel()(ids(), **given)


# -- Megatron-core: the model calls the processor in place of its output layer, with the decoder's layout


class MegatronModel(Model):
    def __init__(self, tied: bool, scale: float = 1.0, ranks: int = 1) -> None:
        super().__init__(tied)
        self.tied, self.scale = tied, scale
        self.config = SimpleNamespace(tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1)

    def forward(
        self, input_ids: Tensor, position_ids: Any, attention_mask: Any, labels: Tensor | None = None, *,
        output_processor: Any = None, output_processor_context: Any = None,
    ) -> Any:  # fmt: skip
        return output_processor(
            hidden_states=self.hidden(input_ids).transpose(0, 1), output_layer=self.lm_head,
            output_weight=self.embedding.weight if self.tied else None, labels=labels, loss_mask=None,
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, decoder_input=None,
            inference_context=None, packed_seq_params=None, runtime_gather_output=None, context=output_processor_context, compute_language_model_loss=None,
            scale_logits=lambda logits: logits * self.scale, config=self.config,
        )  # fmt: skip


def megatron(model: MegatronModel, **context: Any) -> tuple[Tensor, Tensor]:
    options = {"output_processor": output_processor, "output_processor_context": context or None}
    return model(ids(), None, None, following(ids()), **options)


@with_temperatures
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_processor_for_megatron_has_the_results_and_gradients_of_plain_pytorch(
    tied: bool, temperature: Tensor | float
) -> None:
    model, other = MegatronModel(tied), Model(tied)
    assert_same(model, megatron(model, temperature=temperature), other, plain(other, temperature))


@pytest.mark.parametrize(("context", "scale"), [({}, 1.0), ({"temperature": 0.7}, 0.25)], ids=["no_context", "mup"])
def test_the_processor_for_megatron_needs_no_context_and_scales_the_logits(
    context: dict[str, Any], scale: float
) -> None:
    model, other = MegatronModel(tied=False, scale=scale), Model()
    assert_same(model, megatron(model, **context), other, plain(other, context.get("temperature", 1.0), scale=scale))


def test_the_processor_for_megatron_names_what_it_cannot_do() -> None:
    message = r"needs the process group of tensor parallelism \(tensor_model_parallel_size=2\), and output_layer"
    with pytest.raises(OptionError, match=message):
        megatron(MegatronModel(tied=False, ranks=2))
    message = r"^output_processor needs the labels of the forward pass, got none; pass labels to the model$"
    with pytest.raises(OptionError, match=message):
        MegatronModel(tied=False)(ids(), None, None, output_processor=output_processor)


class PartOfTokens(torch.autograd.Function):
    """The part of the tokens that a rank has with sequence parallelism; the gradient of all of them from those of the
    parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return whole.chunk(dist.get_world_size())[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


def megatron_on_ranks(rank: int) -> None:
    """Column-parallel heads of two ranks, with and without shards of the tokens, against one process."""
    dist.init_process_group("gloo")
    per_token = torch.linspace(0.4, 1.6, 8 * SEQUENCES).reshape(SEQUENCES, 8)
    for sequence_parallel, temperature in product((False, True), (0.7, per_token)):
        compare_with_one_process(rank, sequence_parallel, temperature)
    dist.destroy_process_group()


def compare_with_one_process(rank: int, sequence_parallel: bool, temperature: Tensor | float) -> None:
    torch.manual_seed(0)
    hidden, whole, bias = torch.randn(8, SEQUENCES, WIDTH), torch.randn(CLASSES, WIDTH), torch.randn(CLASSES)
    labels, upstream = torch.randint(CLASSES, (SEQUENCES, 8)), torch.randn(2, SEQUENCES, 8)
    one, w, b = (t.clone().requires_grad_() for t in (hidden, whole, bias))
    divide = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    expected = of_logits((one.transpose(0, 1) @ w.t() + b) / divide, labels)
    sum((u * e).sum() for u, e in zip(upstream, expected, strict=True)).backward()

    mine, x = slice(25 * rank, 25 * rank + 25), hidden.clone().requires_grad_()
    layer = SimpleNamespace(
        weight=whole[mine].clone().requires_grad_(), bias=bias[mine].clone().requires_grad_(), tp_group=dist.group.WORLD
    )
    got = output_processor(
        hidden_states=PartOfTokens.apply(x) if sequence_parallel else x, output_layer=layer, output_weight=None,
        labels=labels, context={"temperature": temperature},
        config=SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel),
    )  # fmt: skip
    for found, wanted in zip(got, expected, strict=True):
        assert type(found) is Tensor
        torch.testing.assert_close(found, wanted)
    sum((u * g).sum() for u, g in zip(upstream, got, strict=True)).backward()
    for found, wanted in ((x.grad, one.grad), (layer.weight.grad, w.grad[mine]), (layer.bias.grad, b.grad[mine])):
        assert type(found) is Tensor
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_processor_for_megatron_takes_the_classes_of_a_rank() -> None:
    on_ranks(2, megatron_on_ranks)
