# SPDX-License-Identifier: Apache-2.0
"""The required parts of an op's description, and the derivative of its reference."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.cases import Case, arguments_of, differentiable, leaves, shape_of, with_gradients
from liger_core import Op, use
from liger_core.op import OVERWRITING
from liger_core.plugins import registry


@pytest.mark.slow
def test_gradients_are_the_derivative_of_the_outputs(exact_case: Case) -> None:
    sample = exact_case.sample()
    arguments = arguments_of(exact_case.op, sample)
    names = differentiable(arguments, sample)
    if sample.stops:
        pytest.skip("its gradient is not the derivative by definition")
    if any(arguments[n].dtype != torch.float64 for n in names):
        pytest.skip("an input is not float64, so that differences of outputs are too coarse")
    given = with_gradients(arguments, names)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = leaves(exact_case.op.reference(**{**given, **dict(zip(names, values, strict=True))}))
        # Minus infinity has no difference quotient; the outputs that are constants have no derivative.
        return tuple(t for t in outputs.values() if t.requires_grad)

    assert torch.autograd.gradcheck(function, tuple(given[n] for n in names), fast_mode=True)


class _Accumulating(TorchDispatchMode):
    """Counts what several threads of a CPU add to one element, in any order: the gradient of indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if function.overloadpacket in (aten.index_put, aten.index_put_, aten._index_put_impl_):
            named = dict(zip(("self", "indices", "values", "accumulate"), args, strict=False), **kwargs or {})
            self.found += bool(named.get("accumulate"))
        return function(*args, **kwargs or {})


@pytest.mark.slow
def test_gradients_are_added_in_the_same_order_in_every_run(exact_case: Case) -> None:
    sample = exact_case.sample()
    arguments = arguments_of(exact_case.op, sample)
    given = with_gradients(arguments, differentiable(arguments, sample))
    with _Accumulating() as mode:
        outputs = [t for t in leaves(exact_case.op.reference(**given)).values() if t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    assert mode.found == 0


def test_an_implementation_has_the_signature_of_its_reference(
    implementation: tuple[Op[..., Any], str, Callable[..., Any]],
) -> None:
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


def test_a_misspelled_argument_is_reported_under_the_name_of_the_op(op: Op[..., Any], device: torch.device) -> None:
    given, last = arguments_of(op, next(iter(op.samples(device, torch.float32)))), list(op.signature.parameters)[-1]
    known = ", ".join(op.signature.parameters)
    with pytest.raises(TypeError) as caught:
        op(**given, **{f"{last}x": None})
    assert str(caught.value) == f"{op.name}: arguments must be among {known}, got '{last}x'. Did you mean {last!r}?"


def test_samples_have_names_of_their_own_and_say_why(op: Op[..., Any], device: torch.device) -> None:
    samples = list(op.samples(device, torch.float32))
    assert samples, f"{op.name}: samples() must yield at least one sample"
    twice = repeated(sample.name for sample in samples)
    assert not twice, f"{op.name}: every sample must have a name of its own; these occur twice: {twice}"
    wrong = [sample.name for sample in samples if not re.fullmatch(r"[a-z0-9_]+", sample.name)]
    assert not wrong, f"{op.name}: the name of a sample must consist of a-z, 0-9 and _, got {wrong}"
    silent = [sample.name for sample in samples if not sample.why]
    assert not silent, f"{op.name}: every sample must say which code path it is for in `why`; these do not: {silent}"


def test_misuses_have_names_of_their_own(op: Op[..., Any], device: torch.device) -> None:
    names = [misuse.name for misuse in op.misuses(device)]
    assert names, f"{op.name}: misuses() must yield at least one wrong call"
    twice = repeated(names)
    assert not twice, f"{op.name}: every misuse must have a name of its own; these occur twice: {twice}"


def test_every_dtype_has_the_same_samples(op: Op[..., Any], device: torch.device) -> None:
    expected = [sample.name for sample in op.samples(device, torch.float32)]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        got = [sample.name for sample in op.samples(device, dtype)]
        wanted = "samples() must yield the same names for every dtype"
        assert got == expected, f"{op.name}: {wanted}; {dtype} differs from torch.float32"


def test_every_option_has_a_sample_that_sets_it(op: Op[..., Any], device: torch.device) -> None:
    given = {n for sample in op.samples(device, torch.float32) for n in arguments_of(op, sample)}
    # What an option does to its inputs beyond the outputs cannot be compared with copies of them; tests/ops has those.
    # A sharded vocabulary needs several processes: test_shards.py.
    unset = sorted(set(op.signature.parameters) - given - {*OVERWRITING, "vocab"})
    assert not unset, f"{op.name}: at least one sample must set every parameter; none sets {unset}"


def test_the_docstring_names_every_tensor_with_its_shape_and_every_error(
    op: Op[..., Any], device: torch.device
) -> None:
    text = op.__doc__ or ""
    tensors = [n for n, p in op.signature.parameters.items() if p.annotation in (torch.Tensor, torch.Tensor | None)]
    assert tensors
    bare = [n for n in tensors if not re.search(rf"^ *(\w+, )*{n}(, \w+)* +\(.*\)", text, re.MULTILINE)]
    wanted = "a line that begins with its name and its shape in parentheses, such as `weight  (width,)`"
    assert not bare, f"{op.name}: the docstring must have, for every tensor, {wanted}; it has none for {bare}"
    assert re.search(r"^ *returns +\S", text, re.MULTILINE), f"{op.name}: the docstring must have a line `returns  …`"
    errors = {misuse.error.__name__ for misuse in op.misuses(device)} - {"DeviceError"}
    unnamed = [name for name in sorted(errors) if name not in text]
    wanted = "the docstring must name every error that a misuse raises"
    assert not unnamed, f"{op.name}: {wanted}; it does not name {unnamed}"


def test_work_and_workloads_describe_every_op(op: Op[..., Any]) -> None:
    workloads = list(op.workloads())
    twice = repeated(workload.name for workload in workloads)
    assert not twice, f"{op.name}: every workload must have a name of its own; these occur twice: {twice}"
    quick = next((workload for workload in workloads if workload.quick), None)
    assert quick is not None, f"{op.name}: at least one workload must be quick, for a laptop's CPU"
    args, kwargs = quick.make(torch.device("cpu"), torch.float32)
    work = op.work(*args, **kwargs)
    wanted = (
        f"{op.name}: work() must give 0 < forward_bytes ≤ full_bytes and 0 ≤ forward_flops ≤ full_flops, got {work}"
    )
    assert 0 < work.forward_bytes <= work.full_bytes, wanted
    assert 0 <= work.forward_flops <= work.full_flops, wanted


def repeated(names: Iterable[str]) -> list[str]:
    """The names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]
