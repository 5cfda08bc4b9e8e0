# SPDX-License-Identifier: Apache-2.0
"""Compare the log-probabilities of the training forward pass with those of generation with a cache."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_core.errors import OptionError
from liger_verify.tiny import check_size, tiny_config, without_chance

# Prompt lengths and generated tokens of the samples of `drawn`; a batch of these prompts is padded.
PROMPTS, NEW = (5, 9, 2, 7), 12
# The deviation of noise in a tiny model, whose logits would otherwise be nearly equal.
NOISE = 0.2


class Sample(NamedTuple):
    """The tokens of a prompt and of its answer; log_probs has a number for each of the last tokens if it is known."""

    tokens: list[int]
    prompt: int
    log_probs: list[float] | None = None


class TokenValues(NamedTuple):
    """The log-probabilities of the tokens of answers, and each layer's output at the positions that predict them."""

    log_probs: Tensor
    layers: list[Tensor]


@dataclass(frozen=True)
class SamplerReport:
    """The result of `compare_sampler`; `right` if the gap passes, and `str(report)` says where it begins.

    training            log-probability of each generated token in the training forward pass
    sampler             the same of the sampler
    training_invariant  whether each sequence alone has the same bits as in a batch, in the training forward pass
    sampler_invariant   the same in the sampler; None if a file has its log-probabilities
    layers              layer → relative error of its output between the two
    causes              sentences on the tokens that differ
    """

    training: Tensor
    sampler: Tensor
    tolerance: float
    training_invariant: bool
    sampler_invariant: bool | None = None
    layers: dict[str, float] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)

    @property
    def gap(self) -> dict[str, float]:
        """The gap in nats: mean, root mean square, 99th percentile and largest of the absolute differences."""
        gaps = (self.training - self.sampler).abs().double()
        values = gaps.mean(), gaps.square().mean().sqrt(), gaps.quantile(0.99), gaps.max()
        return dict(zip(("mean", "rms", "p99", "largest"), map(float, values), strict=True))

    @property
    def right(self) -> bool:
        gap = self.gap
        # Rounding makes a few tokens of another program's log-probabilities differ more.
        return (gap["rms"] if self.sampler_invariant is None else gap["largest"]) <= self.tolerance

    def __str__(self) -> str:
        gap = ", ".join(f"{name} {value:.1e}" for name, value in self.gap.items())
        lines = [f"{len(self.training)} log-probabilities differ by {gap} nats"]
        return ("right: " if self.right else "wrong: ") + "\n       ".join(lines + ([] if self.right else self.causes))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary, for --json."""
        names = ("right", "gap", "training_invariant", "sampler_invariant", "layers")
        return {name: getattr(self, name) for name in names} | {"causes": [] if self.right else self.causes}


def compare_sampler(
    model: Any, samples: Sequence[Sample], *, tolerance: float = 1e-4, head_dtype: torch.dtype | None = None,
    sampler_head_dtype: torch.dtype | None = None,
) -> SamplerReport:  # fmt: skip
    """Compare log-probabilities of the training forward pass with those of prefill and decode with the KV cache.

    The training pass pads a batch on the right, the sampler on the left, and both also run every sequence alone. The
    model runs in train mode and in eval mode, on its device and in its dtype; in float64, only bugs make a gap.

    samples             sequences with at least one prompt token. If all have log_probs, these replace the sampler
    tolerance           the largest gap that passes, in nats; for known log_probs, its root mean square
    head_dtype          dtype of the head's matmul and its logits in the training pass; by default the model's
    sampler_head_dtype  the same in the sampler
    """
    known = [sample.log_probs for sample in samples]
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.callback(model.train, model.training)
        with _head(model.train(), head_dtype):
            training, training_alone = _both(_trained, model, samples)
        same = torch.equal(training.log_probs, training_alone.log_probs)
        if None not in known:
            numbers = torch.tensor([number for each in known for number in each or ()]).to(training.log_probs)
            return SamplerReport(training.log_probs, numbers, tolerance, same)
        with _head(model.eval(), sampler_head_dtype):
            sampler, alone = _both(_decoded, model, samples)
    names = ("embeddings", *(f"layers.{i}" for i in range(len(training.layers) - 1)))
    pairs = zip(names, sampler.layers, training.layers, strict=True)
    layers = {name: float((a - b).norm() / b.norm()) for name, a, b in pairs}
    causes = _causes(samples, training.log_probs, alone.log_probs, layers, tolerance)
    invariant = torch.equal(sampler.log_probs, alone.log_probs)
    return SamplerReport(training.log_probs, sampler.log_probs, tolerance, same, invariant, layers, causes)


def read_samples(path: str) -> list[Sample]:
    """Read JSON lines with tokens and the log_probs of the last ones, as another program sampled them."""
    if not Path(path).is_file():
        raise OptionError(f"verify: --log-probs must be a file of JSON lines, there is no file {path!r}")
    samples = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            tokens, log_probs = record["tokens"], record["log_probs"]
            integers = all(type(token) is int and token >= 0 for token in tokens)
            finite = all(isinstance(value, int | float) and -float("inf") < value <= 0 for value in log_probs)
            valid = integers and finite and 0 < len(log_probs) < len(tokens)
        except (json.JSONDecodeError, KeyError, TypeError):
            valid = False
        if not valid:
            raise OptionError(
                f'verify: each line of --log-probs must be {{"tokens": [integers], "log_probs": [numbers ≤ 0]}} with '
                f"fewer log_probs than tokens, got {line[:60]!r} in line {number} of {path}"
            )
        samples.append(Sample(tokens, len(tokens) - len(log_probs), log_probs))
    if not samples:
        raise OptionError(f"verify: --log-probs must have at least one line, got none in {path}")
    return samples


def loaded_model(model: str, liger: bool, seed: int) -> Any:
    """Return a tiny model of a type, or the model of a folder, in float64."""
    from transformers import AutoModelForCausalLM

    import liger_hf

    if Path(model).is_dir():
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        without_chance(loaded.config)
    else:
        config = tiny_config(model, {})
        without_chance(config)
        check_size(model, config)
        torch.manual_seed(seed)
        loaded = AutoModelForCausalLM.from_config(config).double()
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.add_(torch.randn_like(parameter) * NOISE)
    if liger:
        liger_hf.apply(loaded)
    return loaded


def drawn(model: Any, seed: int = 0) -> list[Sample]:
    """Return samples of the model itself: random prompts of several lengths, continued at temperature 1."""
    torch.manual_seed(seed)
    vocabulary, samples = model.config.get_text_config().vocab_size, []
    for length in PROMPTS:
        prompt = torch.randint(vocabulary, (1, length), device=model.device)
        limits = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "top_k": 0, "top_p": 1.0}
        mask = torch.ones_like(prompt)
        samples.append(Sample(model.generate(prompt, attention_mask=mask, **limits)[0].tolist(), length))
    return samples


def _head(model: Any, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the head multiplies in another dtype."""

    def multiplied(head: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        bias = getattr(head, "bias", None)
        return F.linear(args[0].to(dtype), head.weight.to(dtype), None if bias is None else bias.to(dtype))

    return (
        contextlib.nullcontext() if dtype is None else model.get_output_embeddings().register_forward_hook(multiplied)
    )


def _both(
    run: Callable[[Any, Sequence[Sample]], TokenValues], model: Any, samples: Sequence[Sample]
) -> tuple[TokenValues, TokenValues]:
    """Run all samples in one batch, and each alone."""
    alone = [run(model, [sample]) for sample in samples]
    layers = [torch.cat(each) for each in zip(*(values.layers for values in alone), strict=True)]
    return run(model, samples), TokenValues(torch.cat([values.log_probs for values in alone]), layers)


def _trained(model: Any, samples: Sequence[Sample]) -> TokenValues:
    """Run one forward pass without a cache, padded on the right."""
    longest = max(len(sample.tokens) for sample in samples)
    ids = torch.tensor([s.tokens + [0] * (longest - len(s.tokens)) for s in samples], device=model.device)
    lengths = torch.tensor([len(s.tokens) for s in samples], device=model.device)
    mask = (torch.arange(longest, device=model.device) < lengths[:, None]).long()
    output = model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
    return _values(output.logits, output.hidden_states, samples, [sample.prompt - 1 for sample in samples])


def _decoded(model: Any, samples: Sequence[Sample]) -> TokenValues:
    """Run the prompts, padded on the left, then token after token with the cache."""
    longest, cache, outputs = max(sample.prompt for sample in samples), None, []
    ids = torch.tensor([[0] * (longest - s.prompt) + s.tokens[: s.prompt] for s in samples], device=model.device)
    prompts = torch.tensor([sample.prompt for sample in samples], device=model.device)
    mask = (torch.arange(longest, device=model.device) >= longest - prompts[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for step in range(max(len(sample.tokens) - sample.prompt for sample in samples)):
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            output_hidden_states=True,
        )  # fmt: skip
        cache = output.past_key_values
        outputs.append((output.logits[:, -1], *(states[:, -1] for states in output.hidden_states)))
        # A sequence that has ended repeats its last token.
        following = [s.tokens[min(s.prompt + step, len(s.tokens) - 1)] for s in samples]
        ids, positions = torch.tensor(following, device=model.device)[:, None], positions[:, -1:] + 1
        mask = torch.cat((mask, torch.ones_like(ids)), 1)
    logits, *layers = (torch.stack(each, 1) for each in zip(*outputs, strict=True))
    return _values(logits, layers, samples, [0] * len(samples))


def _values(logits: Tensor, layers: Sequence[Tensor], samples: Sequence[Sample], starts: list[int]) -> TokenValues:
    """Select the positions that predict the tokens of the answers; the first of each row is in starts."""
    places = [(i, starts[i] + t, s.tokens[s.prompt + t]) for i, s in enumerate(samples) for t in range(_count(s))]
    rows, columns, tokens = torch.tensor(places, device=logits.device).unbind(-1)
    chosen = logits[rows, columns]
    wide = chosen if chosen.dtype == torch.float64 else chosen.float()
    log_probs = wide.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return TokenValues(log_probs, [layer[rows, columns] for layer in layers])


def _count(sample: Sample) -> int:
    return len(sample.tokens) - sample.prompt


def _causes(
    samples: Sequence[Sample], training: Tensor, alone: Tensor, layers: dict[str, float], tolerance: float
) -> list[str]:
    """Return sentences on what differs: the prefill, decode, padding or the head."""
    first = torch.tensor([t == 0 for s in samples for t in range(_count(s))], device=training.device)
    by_itself = ((training - alone).abs() > tolerance).logical_or(alone.isnan())
    layer = next((name for name, error in layers.items() if not error <= tolerance / 10), None)
    if not by_itself.any():
        where = "each sequence alone agrees, so the batch changes it: look at padding, its mask and position_ids"
    elif not by_itself[first].any():
        where = "the prefill agrees and decoded tokens do not: look at the cache and at position_ids of decode"
    else:
        where = "the tokens after the prefill differ, too: look at what train() and eval() change, and at the head"
    grows = f"layers first differ at {layer}" if layer else "all layers agree, so the head differs"
    return [where, f"{grows} (relative errors: {', '.join(f'{n} {e:.1e}' for n, e in layers.items())})"]
