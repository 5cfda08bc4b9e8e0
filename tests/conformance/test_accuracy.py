# SPDX-License-Identifier: Apache-2.0
"""Outputs and gradients of every backend against the definition in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from conformance.cases import Case, change_of, in_float64, leaves, with_gradients
from conformance.running import KernelCall, Result, Trial, differences, different_bits, output_complaints, penalty, run
from conformance.variations import LAYOUTS
from liger_core import OptionError, use
from liger_core.kernels import plain_matmuls

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("guarded_memory")
def test_outputs_and_gradients_are_as_accurate_as_the_reference(case: Case) -> None:
    trial = Trial(case)
    trial.expect(trial.complaints(trial.run()))


@pytest.mark.usefixtures("guarded_memory")
def test_upstream_gradients_are_read_through_their_strides(layout_case: tuple[Case, str]) -> None:
    case, layout = layout_case
    trial = Trial(case, layout=LAYOUTS[layout])
    trial.expect(trial.complaints(trial.run()))


@pytest.mark.usefixtures("guarded_memory")
def test_strided_small_large_and_shifted_inputs_keep_the_accuracy(variation_case: tuple[Case, str]) -> None:
    case, variation = variation_case
    trial = Trial(case, change=change_of(variation))
    trial.expect(trial.complaints(trial.run()))


def test_two_runs_give_the_same_bits(repeated_case: Case) -> None:
    trial = Trial(repeated_case)
    trial.expect(differences(trial.run(), trial.run()))


def test_a_nan_shows_where_it_does_in_the_definition(form_case: Case) -> None:
    trial = Trial(form_case)
    for name, value in trial.arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            changed = value.detach().clone()
            changed[tuple(size // 2 for size in value.shape)] = torch.nan
            arguments = {**trial.arguments, name: changed}
            try:
                got = leaves(form_case.call(arguments))
            except OptionError:
                # An option for each row, which must be finite.
                continue
            wanted = leaves(trial.define(arguments))
            wrong = [output for output in wanted if not torch.equal(got[output].isnan(), wanted[output].isnan())]
            trial.expect([f"{output} has other NaNs than the definition where {name} has one" for output in wrong])


def test_a_second_backward_gives_the_same_gradients(form_case: Case) -> None:
    trial = Trial(form_case)
    given = with_gradients(trial.arguments, trial.names)
    outputs = leaves(form_case.call(given))
    inputs, upstream = [given[n] for n in trial.names], list(trial.cotangents.values())
    used = [outputs[n] for n in trial.cotangents]
    first, second = (
        dict(zip(trial.names, torch.autograd.grad(used, inputs, upstream, True, allow_unused=True), strict=True))
        for _ in range(2)
    )
    changed = different_bits(first, second)
    trial.expect([f"gradient of {name}: other bits the second time" for name in changed])


@pytest.mark.usefixtures("guarded_memory")
def test_freezing_an_input_leaves_the_other_gradients(frozen_case: tuple[Case, str]) -> None:
    case, frozen = frozen_case
    trial = Trial(case)
    others = [n for n in trial.names if n != frozen]
    reference = trial.defined(trial.arguments, others, trial.cotangents)
    trial.expect(trial.complaints(trial.run(others), reference))


def test_no_work_is_done_for_gradients_that_are_not_requested(
    lone_case: tuple[Case, str], kernel_calls: list[KernelCall]
) -> None:
    case, asked = lone_case
    trial = Trial(case)
    kernel_calls.clear()
    trial.run([asked])
    asking = [call for call in kernel_calls if call.needs]
    if not asking:
        pytest.skip("none of its kernels knows which gradients are requested")
    trial.expect([complaint for call in asking for complaint in call.unasked()])


def test_without_gradients_nothing_requires_one(float32_case: Case) -> None:
    trial = Trial(float32_case)
    with torch.no_grad():
        outputs = leaves(float32_case.call(with_gradients(trial.arguments, trial.names)))
    trial.expect([f"{name} requires a gradient" for name, output in outputs.items() if output.requires_grad])
    trial.expect(output_complaints(outputs, trial.reference.outputs, trial.exact.outputs, float32_case.dtype))


@pytest.mark.usefixtures("guarded_memory")
def test_one_used_output_gets_its_own_gradients(output_case: tuple[Case, str]) -> None:
    case, name = output_case
    trial = Trial(case)
    only = {name: trial.cotangents[name]}
    got, reference = trial.run(cotangents=only), trial.defined(trial.arguments, trial.names, only)
    exact = trial.defined(in_float64(trial.arguments), trial.names, only)
    # An input that does not enter this output has no gradient in the reference; zeros are as good.
    for argument, gradient in got.gradients.items():
        if reference.gradients[argument] is None and gradient is not None and not gradient.any():
            got.gradients[argument] = None
    trial.expect(trial.complaints(got, reference, exact))


def test_autocast_keeps_the_criterion_of_its_precision(form_case: Case) -> None:
    trial = Trial(form_case)
    with _autocast(form_case):
        got = trial.run()
    trial.expect(trial.complaints(got, dtype=torch.bfloat16, define=partial(_under_autocast, trial)))
    dtypes = {n: (g.dtype, trial.arguments[n].dtype) for n, g in got.gradients.items() if g is not None}
    wrong = {n: dtype for n, (dtype, want) in dtypes.items() if dtype != want}
    trial.expect([f"gradient of {n}: dtype {dtypes[n][1]} expected, got {dtype}" for n, dtype in wrong.items()])


def test_autocast_takes_every_tensor_in_its_own_dtype_beside_float32(mixed_case: tuple[Case, str]) -> None:
    case, name = mixed_case
    trial = Trial(case)
    trial.arguments[name] = trial.given[name] = trial.arguments[name].detach().bfloat16()
    exact = trial.defined(in_float64(trial.arguments), trial.names, trial.cotangents)
    with _autocast(case):
        got = trial.run()
    trial.expect(trial.complaints(got, exact=exact, dtype=torch.bfloat16, define=partial(_under_autocast, trial)))


def _autocast(case: Case) -> torch.autocast:
    return torch.autocast(case.device.type, dtype=torch.bfloat16)


def _under_autocast(trial: Trial) -> Result:
    with _autocast(trial.case), plain_matmuls():
        return run(replace(trial.case, backend="reference").call, trial.arguments, trial.names, trial.cotangents)


def test_checkpointing_gives_the_same_bits(pattern_case: Case) -> None:
    from torch.utils.checkpoint import checkpoint

    trial = Trial(pattern_case)
    with use(pattern_case.backend, only=[pattern_case.op]):
        checkpointed = partial(checkpoint, pattern_case.op, use_reentrant=False)
        got = run(lambda given: checkpointed(**given), trial.arguments, trial.names, trial.cotangents)
    trial.expect(differences(got, trial.run()))


# torch.autograd.function.once_differentiable notices only an upstream gradient that depends on the outputs.
@pytest.mark.parametrize("total", [torch.square, torch.positive], ids=["squares", "sum"])
def test_a_second_derivative_is_right_or_refused(form_case: Case, total: Callable[[Tensor], Tensor]) -> None:
    trial = Trial(form_case)
    got = penalty(form_case.call, trial.arguments, trial.names, total)
    exact = penalty(trial.define, in_float64(trial.arguments), trial.names, total)
    reference = penalty(trial.define, trial.arguments, trial.names, total)
    if got is None:
        return
    if exact is None or reference is None:
        trial.expect(["a second derivative that the reference refuses must be refused, got one"])
    else:
        trial.expect(output_complaints(got, reference, exact, form_case.dtype))
