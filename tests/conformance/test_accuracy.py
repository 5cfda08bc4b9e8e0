# SPDX-License-Identifier: Apache-2.0
"""Outputs and gradients of every backend against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import Case, in_float64, leaves, with_gradients
from conformance.running import Trial, different_bits, output_complaints, run
from liger_core import GradientError, use


@pytest.mark.usefixtures("poisoned_memory")
def test_outputs_and_gradients_are_as_accurate_as_the_reference(case: Case) -> None:
    trial = Trial(case)
    assert trial.complaints(trial.run()) == []


def test_inputs_are_not_overwritten(light_case: Case) -> None:
    trial = Trial(light_case)
    before = {n: v.clone() for n, v in trial.arguments.items() if isinstance(v, Tensor)}
    trial.run()
    assert different_bits(before, trial.arguments) == []


def test_two_runs_give_the_same_bits(light_case: Case) -> None:
    trial = Trial(light_case)
    first, second = trial.run(), trial.run()
    assert different_bits(first.outputs, second.outputs) == []
    assert different_bits(first.gradients, second.gradients) == []


def test_a_second_backward_gives_the_same_gradients(float32_case: Case) -> None:
    trial = Trial(float32_case)
    given = with_gradients(trial.arguments, trial.names)
    outputs = leaves(float32_case.call(given))
    weights = trial.reference.cotangents
    inputs = [given[n] for n in trial.names]
    first, second = (
        torch.autograd.grad([outputs[n] for n in weights], inputs, list(weights.values()), retain_graph=True, allow_unused=True)
        for _ in range(2)
    )
    assert different_bits(dict(zip(trial.names, first, strict=True)), dict(zip(trial.names, second, strict=True))) == []


@pytest.mark.usefixtures("poisoned_memory")
def test_freezing_an_input_leaves_the_other_gradients(frozen_case: tuple[Case, str]) -> None:
    case, frozen = frozen_case
    trial = Trial(case)
    others = [n for n in trial.names if n != frozen]
    reference = run(trial.define, trial.arguments, others, trial.reference.cotangents)
    assert trial.complaints(trial.run(others), reference) == []


def test_without_gradients_nothing_requires_one(float32_case: Case) -> None:
    trial = Trial(float32_case)
    with torch.no_grad():
        outputs = leaves(float32_case.call(with_gradients(trial.arguments, trial.names)))
    assert [n for n, t in outputs.items() if t.requires_grad] == []
    assert output_complaints(outputs, trial.reference.outputs, trial.exact.outputs, float32_case.dtype) == []


@pytest.mark.usefixtures("poisoned_memory")
def test_one_used_output_gets_its_own_gradients(output_case: tuple[Case, str]) -> None:
    case, name = output_case
    trial = Trial(case)
    only = {name: trial.reference.cotangents[name]}
    got, reference = trial.run(cotangents=only), run(trial.define, trial.arguments, trial.names, only)
    exact = run(trial.define, in_float64(trial.arguments), trial.names, only)
    # An input that does not enter this output has no gradient in the reference; zeros are as good.
    for argument, gradient in got.gradients.items():
        if reference.gradients[argument] is None and gradient is not None and not gradient.any():
            got.gradients[argument] = None
    assert trial.complaints(got, reference, exact) == []


def test_autocast_keeps_the_criterion_of_its_precision(form_case: Case) -> None:
    trial = Trial(form_case)
    with torch.autocast(form_case.device.type, dtype=torch.bfloat16):
        got = trial.run()
        reference = run(trial.define, trial.arguments, trial.names, trial.reference.cotangents)
    assert trial.complaints(got, reference, dtype=torch.bfloat16) == []
    assert {n: g.dtype for n, g in got.gradients.items() if g is not None} == {n: trial.arguments[n].dtype for n in trial.names}


def test_checkpointing_gives_the_same_bits(form_case: Case) -> None:
    from torch.utils.checkpoint import checkpoint

    trial = Trial(form_case)
    with use(form_case.backend, only=[form_case.op]):
        got = run(
            lambda given: checkpoint(form_case.op, **given, use_reentrant=False), trial.arguments, trial.names, trial.reference.cotangents
        )
    plain = trial.run()
    assert different_bits(got.outputs, plain.outputs) == []
    assert different_bits(got.gradients, plain.gradients) == []


def test_a_second_derivative_is_right_or_refused(form_case: Case) -> None:
    trial = Trial(form_case)
    got, exact = _penalty(form_case.call, trial.arguments, trial.names), _penalty(trial.define, in_float64(trial.arguments), trial.names)
    reference = _penalty(trial.define, trial.arguments, trial.names)
    if got is None:
        return
    assert exact is not None, "the reference refuses what the implementation answers"
    assert reference is not None
    assert output_complaints(got, reference, exact, form_case.dtype) == []


def _penalty(call: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any], names: list[str]) -> dict[str, Tensor] | None:
    """Gradients of the summed squares of the gradients, or None where that is refused."""
    given = with_gradients(arguments, names)
    total = sum(t.square().sum() for t in leaves(call(given)).values() if t.requires_grad)
    inputs = [given[n] for n in names]
    try:
        first = torch.autograd.grad(total, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    except GradientError:
        return None
    return dict(zip(names, second, strict=True))
