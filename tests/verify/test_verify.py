# SPDX-License-Identifier: Apache-2.0
"""`liger verify` passes right setups, and says of each planted bug what it is; its attention for parts of sequences is
that of Transformers."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

from liger_core.errors import DeviceError, OptionError
from liger_verify import attention, compare
from liger_verify.batches import batches
from liger_verify.command import verify
from liger_verify.tiny import check_size
from liger_verify.training import Training
from verify import steps

SETUPS = {
    "context": {"cp": 2},
    "sharded": {"shard": "fsdp2", "accumulation": 3},
    "replicated": {"shard": "ddp", "accumulation": 2},
    "plain": {"shard": "none", "liger": False},
    "norms_of_heads": {"model": "qwen3", "tp": 2, "ranks": 4, "accumulation": 2},
    "everything": {"tp": 2, "cp": 2, "ranks": 8, "accumulation": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_a_right_setup_passes(setup: dict[str, Any]) -> None:
    training = Training(**setup)
    report = compare(training, ranks=training.ranks, sizes=training.sizes)
    assert report.right, str(report)
    assert str(report).startswith("right: loss ")


BUGS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "logits gathered twice": (steps.gathered, {"ranks": 4, "sizes": {"tp": 4}}, ["larger by log 4 (tp), as if the classes of every rank were counted 4 times"]),
    "mean of the means of shards": (steps.MeanOfMeans(cp=2, ranks=4), {}, ["the loss is ", "going back from the loss, gradients first diverge at lm_head.weight", "of which no factor explains more than"]),
    "labels shifted inside a part of a sequence": (steps.ShiftedInside(cp=2), {}, ["the loss is ", "gradients first diverge at lm_head.weight"]),
    "gradients averaged": (steps.Averaged(shard="none", ranks=4), {}, ["gradients first diverge at lm_head.weight in lm_head: it is 0.25 times the right one, which is 1 / dp or dp × cp (4) (21 of 21 gradients differ)"]),
    "a norm's gradient that is not summed": (steps.without_a_sum, {"ranks": 2, "sizes": {"tp": 2}}, ["gradients first diverge at norm.weight in norm: every rank has only a part of it: it was not summed over tp (1 of 2 gradients differ)"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_a_planted_bug_is_named(bug: tuple[Any, dict[str, Any], list[str]]) -> None:
    step, options, sentences = bug
    if isinstance(step, Training):
        options = {"ranks": step.ranks, "sizes": step.sizes}
    report = compare(step, **options)
    assert not report.right
    for sentence in sentences:
        assert sentence in str(report)


def test_a_mean_over_no_tokens_is_named() -> None:
    report = compare(steps.without_tokens, ranks=2)
    sentence = "the loss is nan, not 1.000000 on rank 1: a mean over the tokens of a rank that has none is 0 / 0"
    assert str(report) == f"wrong: {sentence}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (steps.without_a_gradient, "a.c.weight in a: it has no gradient"),
        (steps.OnRankOne(math.nan), "a.b.weight in a: it is not finite on rank 1"),
        (steps.OnRankOne(math.inf), "a.b.weight in a: it is not finite on rank 1"),
        (steps.OnRankOne(None), "a.b.weight in a: it has no gradient on rank 1"),
        (steps.OnRankOne("absent"), "a.b.weight in a: it is not there on rank 1"),
        (steps.parts, "a.b.weight in a: it is zero on rank 1"),
    ],
    ids=["missing", "nan", "inf", "none", "absent", "zero"],
)
def test_a_gradient_that_a_rank_has_not_is_named_and_no_rank_waits_for_it(step: Any, sentence: str) -> None:
    report = compare(step, ranks=2, patience=20)
    assert f"gradients first diverge at {sentence} (1 of 2 gradients differ)" in str(report)


def test_a_gradient_that_is_zero_by_nature_is_compared_with_its_round_off() -> None:
    report = compare(steps.KeyBias(), ranks=2)
    assert report.right, str(report)
    assert "attention.key.bias: within the round-off of one process in float32" in str(report)


@pytest.mark.parametrize(
    ("step", "name"),
    [(steps.KeyBias(fault=1e-4), "attention.key.bias"), (steps.KeyBias(factor=1.001), "attention.key.weight")],
    ids=["bias", "weight"],
)
def test_round_off_hides_no_fault(step: steps.KeyBias, name: str) -> None:
    report = compare(step, ranks=2)
    assert [difference.name for difference in report.wrong] == [name], str(report)


def test_a_parameter_that_no_loss_depends_on_is_named() -> None:
    report = compare(steps.without_a_loss, ranks=2)
    assert report.right
    assert str(report).startswith("right: loss 1.000000 and 1 gradients on 2 ranks")
    assert "no loss depends on a.sinks, which has no gradient" in str(report)
    assert report.as_dict()["notes"] == report.notes


REVERSIBLE = {"is_decoder": True, "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32], "num_buckets": 2}
# What a parallel step has been called wrong for, although it is right.
BY_NATURE = {
    "sinks": {"model": "gpt_oss", "shard": "ddp"},
    "sinks_and_parts_of_sequences": {"model": "gpt_oss", "cp": 2},
    "biases_of_keys_and_dropout": {"model": "opt", "shard": "ddp"},
    "gradients_of_no_token": {"model": "biogpt", "shard": "ddp"},
    # Trainable once Transformers has loaded it: DDP waits for its gradient and averages none.
    "a_frozen_bias_of_a_router": {"model": "laguna", "shard": "ddp"},
    "a_bias_without_a_loss_and_a_backward_pass_of_its_own": {"model": "reformer", "shard": "ddp", "accumulation": 2, "options": REVERSIBLE},
    "the_text_part_of_several_parts": {"model": "emu3", "shard": "ddp"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("setup", BY_NATURE.values(), ids=BY_NATURE.keys())
def test_what_differs_by_nature_is_not_wrong(setup: dict[str, Any]) -> None:
    training = Training(**setup, liger=False)
    report = compare(training, ranks=2, sizes=training.sizes)
    assert report.right, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": ["rwkv"], "cp": 2}, r"rwkv .* failed: rank \d: OptionError: verify: with cp, all 2 layers of rwkv must have attention"),
        ({"model": ["git"], "shard": "ddp"}, "verify: git must compute a loss from input_ids, position_ids and labels, on one process it raised ValueError: "),
    ],
    ids=["layers that see their part of a sequence alone", "no loss of tokens alone"],
)  # fmt: skip
def test_a_model_that_cannot_be_compared_is_refused_with_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        verify(**options, liger=False)


@pytest.mark.slow
def test_a_random_loss_is_refused() -> None:
    with pytest.raises(Exception, match="verify: the loss of llama must not be random, got "):
        compare(steps.Random(shard="ddp"), ranks=2)


@pytest.mark.parametrize("model", ["xlnet", "prophetnet"])
def test_a_type_that_cannot_be_made_tiny_is_refused_with_a_sentence(model: str) -> None:
    with pytest.raises(
        OptionError, match=f"verify: {model} could not be made tiny: .*; pass a folder with a small checkpoint"
    ):
        verify(model=[model])


@pytest.mark.parametrize(("model", "parts"), [("nougat", "encoder, decoder"), ("gemma4_assistant", "text_config")])
def test_a_type_whose_config_has_no_parts_by_default_is_refused_with_their_names(model: str, parts: str) -> None:
    sentence = f"could not be made tiny: its default config has no {parts}; pass a folder with a small checkpoint"
    with pytest.raises(OptionError, match=f"^verify: {model} {sentence}$"):
        check_size(model, Training(model).config())


def test_a_model_of_several_texts_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def ambiguous(self: Any, decoder: bool | None = None) -> Any:
        if decoder is None:
            raise ValueError("Multiple valid text configs were found")
        return self

    monkeypatch.setattr("transformers.LlamaConfig.get_text_config", ambiguous)
    with pytest.raises(
        OptionError, match="verify: llama must have one text config, Transformers raised ValueError: Multiple valid"
    ):
        Training("llama").check()


def test_one_rank_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(OptionError, match="ranks must be an integer of at least 2"):
        compare(steps.parts, ranks=1)


def test_ranks_run_on_the_cpu_or_on_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="device must be cpu or cuda, got 'gpu'"):
        compare(steps.parts, ranks=2, device="gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(DeviceError, match="4 ranks need a GPU each, PyTorch finds 3"):
        verify(device="cuda", matrix=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("setup", [{"tp": 2}, {"cp": 2}, {"shard": "ddp"}], ids=str)
def test_a_right_setup_passes_on_gpus(setup: dict[str, Any]) -> None:
    training = Training(**setup)
    assert compare(training, ranks=2, sizes=training.sizes, device="cuda").right


def test_the_command_prints_json_and_ends_with_1_where_something_differs(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        verify(step=f"{steps.__file__}:talks", ranks=2, as_json=True)
    assert ended.value.exit_code == 1
    found = json.loads(capfd.readouterr().out)
    assert not found["right"]
    assert found["gradients"]["a.b.weight"]["factor"] == 2
    assert "it is 2 times the right one, which is ranks (2)" in found["sentences"][0]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("nowhere.py:step", "be FILE.py:FUNCTION, there is no Python file 'nowhere.py'"),
        (f"{__file__}:nothing", "name a function of .*, which has no function 'nothing'"),
        (__file__, "be FILE.py:FUNCTION, got '.*', which names no function"),
        (f"{__file__}:", "be FILE.py:FUNCTION, got '.*:', which names no function"),
    ],
    ids=["file", "function", "no_function", "empty"],
)
def test_a_step_that_is_not_there_is_refused(step: str, message: str) -> None:
    with pytest.raises(OptionError, match=f"verify: --step must {message}"):
        verify(step=step)


ROWS, HEADS, TOKENS, WIDTH = 2, 4, 16, 8


def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    (batch,) = batches(1, ROWS, TOKENS, 50, 0)
    attention.set_batch(batch, slice(0, TOKENS), None)
    return attention.attention(SimpleNamespace(), query, key, value, mask, **options)[0]  # type: ignore[arg-type]


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
    options = {"position_ids": torch.arange(TOKENS), "output_attentions": True, "num_items_in_batch": torch.ones(())}
    assert torch.equal(run(*inputs, indices=None, **options), run(*inputs))
