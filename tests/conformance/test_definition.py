# SPDX-License-Identifier: Apache-2.0
"""What every op's description must say, and the derivative of its reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.cases import Case, arguments_of, differentiable, leaves, shape_of, with_gradients
from liger_core import Op, use
from liger_core.plugins import registry


def test_gradients_are_the_derivative_of_the_outputs(exact_case: Case) -> None:
    sample = exact_case.sample()
    arguments = arguments_of(exact_case.op, sample)
    names = differentiable(arguments, sample)
    if any(arguments[n].dtype != torch.float64 for n in names):
        pytest.skip("an input is not float64, so that differences of outputs are too coarse")
    given = with_gradients(arguments, names)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = leaves(exact_case.op.reference(**{**given, **dict(zip(names, values, strict=True))}))
        # Minus infinity has no difference quotient; the outputs that are constants have no derivative.
        return tuple(t for t in outputs.values() if t.requires_grad)

    assert torch.autograd.gradcheck(function, tuple(given[n] for n in names), fast_mode=True)


def test_an_implementation_has_the_signature_of_its_reference(implementation: tuple[Op[..., Any], str, Callable[..., Any]]) -> None:
    op, _, function = implementation
    assert shape_of(function) == shape_of(op.reference)


def test_no_backend_was_left_out_for_a_signature_or_another_fault() -> None:
    assert registry().faults() == []


def test_a_wrong_call_raises_its_sentence(misuse: tuple[Op[..., Any], str, str], device: torch.device) -> None:
    op, backend, name = misuse
    wrong = next(m for m in op.misuses(device) if m.name == name)
    with use(backend, only=[op]), pytest.raises(wrong.error) as caught:
        op(*wrong.args, **wrong.kwargs)
    assert type(caught.value) is wrong.error
    assert str(caught.value) == wrong.message


def test_samples_have_names_of_their_own_and_say_why(op: Op[..., Any], device: torch.device) -> None:
    samples = list(op.samples(device, torch.float32))
    assert len({sample.name for sample in samples}) == len(samples) > 0
    assert [sample.name for sample in samples if not sample.why or not re.fullmatch(r"[a-z0-9_]+", sample.name)] == []


def test_misuses_have_names_of_their_own(op: Op[..., Any], device: torch.device) -> None:
    names = [misuse.name for misuse in op.misuses(device)]
    assert len(set(names)) == len(names) > 0


def test_every_dtype_has_the_same_samples(op: Op[..., Any], device: torch.device) -> None:
    names = {dtype: [s.name for s in op.samples(device, dtype)] for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
    assert len({tuple(n) for n in names.values()}) == 1


def test_every_option_has_a_sample_that_sets_it(op: Op[..., Any], device: torch.device) -> None:
    given = {n for sample in op.samples(device, torch.float32) for n in arguments_of(op, sample)}
    # What an option does to its inputs beyond the outputs cannot be compared with copies of them; tests/ops has those.
    assert set(op.signature.parameters) - given <= {"inplace", "main_grad", "overwrite"}


def test_the_docstring_names_every_tensor_with_its_shape_and_every_error(op: Op[..., Any], device: torch.device) -> None:
    text = op.__doc__ or ""
    tensors = [n for n, p in op.signature.parameters.items() if p.annotation in ("Tensor", "Tensor | None")]
    assert [n for n in tensors if not re.search(rf"^ *(\w+, )*{n}(, \w+)* +\(.*\)", text, re.MULTILINE)] == []
    assert re.search(r"^ *returns +\S", text, re.MULTILINE)
    errors = {misuse.error.__name__ for misuse in op.misuses(device)} - {"DeviceError"}
    assert [name for name in sorted(errors) if name not in text] == []


def test_work_and_workloads_describe_every_op(op: Op[..., Any]) -> None:
    workloads = list(op.workloads())
    assert any(w.quick for w in workloads)
    assert len({w.name for w in workloads}) == len(workloads)
    args, kwargs = next(w for w in workloads if w.quick).make(torch.device("cpu"), torch.float32)
    work = op.work(*args, **kwargs)
    assert 0 < work.forward_bytes <= work.full_bytes
    assert 0 <= work.forward_flops <= work.full_flops
