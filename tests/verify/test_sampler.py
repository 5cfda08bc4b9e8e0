# SPDX-License-Identifier: Apache-2.0
"""`liger verify --sampler` passes right models, and names what makes a sampler differ from training."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

from liger_core.errors import OptionError
from liger_verify import compare_sampler
from liger_verify.command import verify
from liger_verify.sampler import Sample, drawn, loaded_model, read_samples


@pytest.mark.slow
@pytest.mark.parametrize("liger", [False, True], ids=["plain", "liger"])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3_text"])
def test_a_right_model_passes_in_float64(model: str, liger: bool) -> None:
    loaded = loaded_model(model, liger, 0)
    report = compare_sampler(loaded, drawn(loaded))
    assert report.gap["largest"] < 1e-5, str(report)
    assert str(report).startswith("right: 48 log-probabilities differ by mean ")


def drop_a_key(model: Any) -> None:
    """Decode without the last cached position."""
    original = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs["position_ids"] is not None and kwargs["position_ids"].shape[1] == 1:
            kwargs["attention_mask"] = kwargs["attention_mask"].clone()
            kwargs["attention_mask"][:, -2] = 0
        return original(*args, **kwargs)

    model.model.forward = forward


def with_positions(change: Callable[[Tensor], Tensor], model: Any) -> None:
    """Give the rotary embedding other positions, (rows, tokens)."""
    original = model.model.rotary_emb.forward

    def forward(x: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return original(x, change(position_ids), *args, **kwargs)

    model.model.rotary_emb.forward = forward


def of_the_next(positions: Tensor) -> Tensor:
    """Give decoded tokens the next position."""
    return positions + (positions.shape[1] == 1)


def of_columns(positions: Tensor) -> Tensor:
    """Count positions from the first column, padding included."""
    columns = positions.shape[1]
    return torch.arange(columns, device=positions.device).expand_as(positions) if columns > 1 else positions


def round_the_head(model: Any) -> None:
    """Multiply by the head in bfloat16 where the model generates."""

    def rounded(head: Any, args: Any, output: Any) -> Any:
        return output if head.training else (args[0].bfloat16() @ head.weight.bfloat16().t()).to(output.dtype)

    model.lm_head.register_forward_hook(rounded)


DECODE = "the prefill agrees and decoded tokens do not: look at the cache and at position_ids of decode"
BUGS: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "the cache is off by one": (drop_a_key, DECODE, "layers first differ at layers.0"),
    "positions of decode are off by one": (partial(with_positions, of_the_next), DECODE, "layers first differ at layers.0"),
    "left padding without position_ids": (partial(with_positions, of_columns), "each sequence alone agrees, so the batch changes it: look at padding, its mask and position_ids", "layers first differ at layers.0"),
    "a bf16 head": (round_the_head, "the tokens after the prefill differ, too: look at what train() and eval() change, and at the head", "all layers agree, so the head differs"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_planted_bug_is_named(bug: tuple[Callable[[Any], None], str, str]) -> None:
    plant, where, layer = bug
    loaded = loaded_model("llama", False, 0)
    samples = drawn(loaded)
    plant(loaded)
    report = compare_sampler(loaded, samples)
    assert not report.right
    assert where in str(report)
    assert layer in str(report)


def test_a_float32_head_narrows_the_gap_to_a_precise_sampler() -> None:
    loaded = loaded_model("llama", False, 0)
    samples = drawn(loaded)
    gaps = [
        compare_sampler(loaded.bfloat16(), samples, head_dtype=head, sampler_head_dtype=torch.float32).gap["rms"]
        for head in (torch.bfloat16, torch.float32)
    ]
    assert 0 < gaps[1] < gaps[0]
    assert not loaded.lm_head._forward_hooks


@pytest.mark.slow
def test_the_log_probabilities_of_a_file_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded, file = loaded_model("llama", True, 0), tmp_path / "sampled.jsonl"
    samples = drawn(loaded)
    report = compare_sampler(loaded, samples)
    pairs = zip(samples, report.sampler.split([len(s.tokens) - s.prompt for s in samples]), strict=True)
    lines = [json.dumps({"tokens": s.tokens, "log_probs": numbers.tolist()}) for s, numbers in pairs]
    file.write_text("\n".join(lines) + "\n")
    assert compare_sampler(loaded, read_samples(str(file))).right
    verify(model=["llama"], log_probs=str(file), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["right"]
    assert [c["head_dtype"] for c in printed["comparisons"]] == ["bfloat16", "float32"]
    with pytest.raises(typer.Exit):
        verify(model=["llama"], log_probs=str(file), as_json=True, tolerance=1e-6)
    assert not json.loads(capsys.readouterr().out)["right"]
    shifted = [Sample(s.tokens, s.prompt, [0.0, *s.log_probs[:-1]]) for s in read_samples(str(file)) if s.log_probs]
    assert not compare_sampler(loaded, shifted, tolerance=0.05).right


WRONG = {
    "no JSON": "tokens",
    "no log_probs": '{"tokens": [1, 2]}',
    "as many log_probs as tokens": '{"tokens": [1, 2], "log_probs": [-1, -1]}',
    "a positive number": '{"tokens": [1, 2, 3], "log_probs": [1.5]}',
    "NaN": '{"tokens": [1, 2, 3], "log_probs": [NaN]}',
    "text": '{"tokens": ["a", "b"], "log_probs": [-1]}',
    "a list": "[1, 2]",
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_a_wrong_line_is_an_error_before_a_model_is_loaded(line: str, tmp_path: Path) -> None:
    file = tmp_path / "sampled.jsonl"
    file.write_text('{"tokens": [1, 2, 3], "log_probs": [-1]}\n' + line)
    with pytest.raises(OptionError, match=r"each line of --log-probs must be .*, got .* in line 2 of "):
        verify(model=["no model"], log_probs=str(file))


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(OptionError, match="there is no file 'nowhere'"):
        read_samples("nowhere")
    with pytest.raises(OptionError, match="must have at least one line"):
        read_samples(str(tmp_path / "empty"))
