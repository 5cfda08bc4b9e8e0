# SPDX-License-Identifier: Apache-2.0
"""The cases: op × backend × dtype × sample, all taken from the registry."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.variations import INPUT_LAYOUTS, LAYOUTS, OFFSETS, SCALES, Change, shifted
from liger_core import BackendError, Op, Sample, Unsupported, use
from liger_core.plugins import registry

# Elements of a sample: past these an interpreter takes minutes for all checks together.
LARGE = 100_000
AnyOp = Op[..., Any]
LOW = (torch.float32, torch.bfloat16, torch.float16)


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Case:
    """One sample of one op in one dtype on one device, for one backend."""

    op: AnyOp
    backend: str
    dtype: torch.dtype
    name: str
    device: torch.device

    @property
    def id(self) -> str:
        return f"{self.backend}-{self.op.name}-{word(self.dtype)}-{self.name}"

    @property
    def key(self) -> tuple[str, ...]:
        return (self.op.name, self.backend, word(self.dtype), self.name)

    def sample(self) -> Sample:
        """A copy of what the seed of the test draws; the random numbers continue after it."""
        sample, state = drawn(self.op, self.device, self.dtype, torch.initial_seed())[self.name]
        set_random_state(self.device, state)
        return copy_of(sample)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the op with this case's backend selected; a declined call skips the test."""
        with use(self.backend, only=[self.op]):
            try:
                return self.op(**arguments)
            except BackendError as error:
                if isinstance(error.__cause__, Unsupported):
                    pytest.skip(f"{self.backend} declines: {error.__cause__}")
                raise


def implementations(device: torch.device, only: str | None) -> Iterator[tuple[AnyOp, str, Callable[..., Any]]]:
    """(op, backend, implementation) for the named backend, else for every one that runs on the device and that `auto`
    may select."""
    found = registry()
    for name, table in found.implementations.items():
        backend = found.backends[name]
        if not (backend.automatic if only is None else name == only) or device.type not in backend.device_types:
            continue
        for op_name, implementation in table.items():
            yield found.ops[op_name], name, implementation


@cache
def drawn(op: AnyOp, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, tuple[Sample, list[Tensor]]]:
    """Name → sample, and the state of the random numbers behind it.

    Drawn once: one sample needs all those before it.
    """
    torch.manual_seed(seed)
    return {sample.name: (sample, random_state(device)) for sample in op.samples(device, dtype)}


def random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_state(device: torch.device, state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def copy_of(sample: Sample) -> Sample:
    """A copy with the same strides; tensors that share memory still do."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        own = storages.setdefault(storage.data_ptr(), storage.clone())
        return value.new_empty(0).set_(own, value.storage_offset(), value.shape, value.stride())

    kwargs = {name: copied(value) for name, value in sample.kwargs.items()}
    return replace(sample, args=tuple(map(copied, sample.args)), kwargs=kwargs)


def samples(op: AnyOp, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Sample]:
    """For reading only."""
    return [sample for sample, _ in drawn(op, device, dtype, 0).values()]


def sample_names(op: AnyOp, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    return tuple(sample.name for sample in samples(op, device, dtype))


@cache
def size(op: AnyOp, device: torch.device, name: str) -> int:
    """Elements of the largest tensor of a sample."""
    sample = next(s for s in samples(op, device) if s.name == name)
    return max(v.numel() for v in arguments_of(op, sample).values() if isinstance(v, Tensor))


def takes_minutes(case: Case) -> bool:
    """Whether a large sample meets kernels that an interpreter runs: on the CPU, all implementations but the
    definition."""
    if case.device.type != "cpu" or registry().implementations[case.backend][case.op.name] is case.op.reference:
        return False
    return size(case.op, case.device, case.name) > LARGE


@cache
def form_names(op: AnyOp, device: torch.device) -> tuple[str, ...]:
    """The first sample of every form of call: which arguments are given, and the values of those that are not tensors."""
    return _first_of_each(op, device, lambda value: "Tensor" if isinstance(value, Tensor) else value)


@cache
def pattern_names(op: AnyOp, device: torch.device) -> tuple[str, ...]:
    """The first sample of every form of call if numbers make no difference, as they make none to what a call saves for
    the backward pass."""

    def seen_as(value: Any) -> Any:
        return "Tensor" if isinstance(value, Tensor) else value if isinstance(value, str | bool) else None

    return _first_of_each(op, device, seen_as)


def _first_of_each(op: AnyOp, device: torch.device, seen_as: Callable[[Any], Any]) -> tuple[str, ...]:
    """The samples that differ from those before in what `seen_as` makes of their arguments, or in what is frozen; None
    makes no difference."""
    found: dict[str, str] = {}
    for sample in samples(op, device):
        seen = [(name, seen_as(value)) for name, value in arguments_of(op, sample).items()]
        found.setdefault(f"{[pair for pair in seen if pair[1] is not None]} {sorted(sample.frozen)}", sample.name)
    return tuple(found.values())


@cache
def active_outputs(op: AnyOp, device: torch.device, name: str) -> dict[str, int]:
    """Name → dimensions of the outputs of a sample that get a gradient."""
    sample = next(s for s in samples(op, device) if s.name == name)
    arguments = arguments_of(op, sample)
    outputs = leaves(op.reference(**with_gradients(arguments, differentiable(arguments, sample))))
    return {name: output.dim() for name, output in outputs.items() if output.requires_grad}


def frozen_cases(device: torch.device, only: str | None) -> Iterator[tuple[Case, str]]:
    """Float32 cases with two or more inputs that get a gradient, and which one of them to freeze."""
    yield from _one_of_several(device, only, "float32")


def lone_cases(device: torch.device, only: str | None) -> Iterator[tuple[Case, str]]:
    """One sample per form with two or more inputs that get a gradient, and which one of them gets it alone."""
    yield from _one_of_several(device, only, "form")


def _one_of_several(device: torch.device, only: str | None, kind: str) -> Iterator[tuple[Case, str]]:
    for case in cases(device, only, kind):
        names = _differentiable_of(case)
        if len(names) > 1:
            yield from ((case, name) for name in names)


def mixed_cases(device: torch.device, only: str | None) -> Iterator[tuple[Case, str]]:
    """Every floating-point tensor of an op, in bfloat16 in the first float32 sample that has it."""
    seen: set[tuple[AnyOp, str, str]] = set()
    for case in cases(device, only, "form"):
        for name, value in arguments_of(case.op, _sample_of(case)).items():
            if isinstance(value, Tensor) and value.is_floating_point() and (case.op, case.backend, name) not in seen:
                seen.add((case.op, case.backend, name))
                yield case, name


def _sample_of(case: Case) -> Sample:
    """For reading only."""
    return next(s for s in samples(case.op, case.device, case.dtype) if s.name == case.name)


def _differentiable_of(case: Case) -> list[str]:
    return differentiable(arguments_of(case.op, _sample_of(case)), _sample_of(case))


def output_cases(device: torch.device, only: str | None) -> Iterator[tuple[Case, str]]:
    """Float32 cases of the ops with two or more differentiable outputs, and the one that is used."""
    for case in cases(device, only, "float32"):
        names = active_outputs(case.op, device, case.name)
        if len(names) > 1:
            yield from ((case, name) for name in names)


def layout_cases(device: torch.device, only: str | None) -> Iterator[tuple[Case, str]]:
    """Upstream gradients that are not dense: slices for every float32 case, the other layouts for one sample per form."""
    for case in cases(device, only, "float32"):
        dimensions = max(active_outputs(case.op, device, case.name).values(), default=0)
        is_form = case.name in form_names(case.op, device)
        for name, layout in LAYOUTS.items():
            if dimensions >= layout.dimensions and (is_form or name == "sliced"):
                yield case, name


def variation_cases(device: torch.device, only: str | None) -> Iterator[tuple[Case, str]]:
    """Other strides and magnitudes of the inputs, one sample per form; with a common offset, every input of an op's
    first sample.

    Strides in bfloat16 too, for which some kernels are made alone.
    """
    for case in cases(device, only, "low_form"):
        yield from ((case, name) for name in INPUT_LAYOUTS)
    for case in cases(device, only, "form"):
        yield from ((case, name) for name in (*INPUT_LAYOUTS, *SCALES))
        if case.name == form_names(case.op, device)[0]:
            yield from ((case, f"{name}_{direction}") for name in _differentiable_of(case) for direction in OFFSETS)


def change_of(variation: str) -> Change:
    """What a variation's name stands for."""
    if variation in INPUT_LAYOUTS or variation in SCALES:
        return {**INPUT_LAYOUTS, **SCALES}[variation]
    name, _, direction = variation.rpartition("_")
    return shifted(name, OFFSETS[direction])


def cases(device: torch.device, only: str | None, kind: str) -> Iterator[Case]:
    """The cases of a kind.

    all       every dtype
    float32   every sample in float32
    form      one sample per form of call, in float32
    low_form  the same in bfloat16
    pattern   one sample per pattern of what is saved, in float32
    repeated  every dtype on a GPU, where programs run at once and in any order; elsewhere those of "form"
    exact     the definitions in float64
    """
    if kind == "repeated":
        kind = "form" if device.type == "cpu" else "all"
    for op, backend, implementation in implementations(device, only):
        definition = implementation is op.reference
        if kind == "exact":
            dtypes: tuple[torch.dtype, ...] = (torch.float64,) if definition else ()
        elif kind == "all":
            dtypes = (torch.float64, *LOW) if definition else LOW
        else:
            dtypes = (torch.bfloat16,) if kind == "low_form" else (torch.float32,)
        for dtype in dtypes:
            chosen = {"form": form_names, "low_form": form_names, "pattern": pattern_names}.get(kind)
            for name in chosen(op, device) if chosen else sample_names(op, device, dtype):
                yield Case(op, backend, dtype, name, device)


def arguments_of(op: AnyOp, sample: Sample) -> dict[str, Any]:
    """Parameter name → argument of a sample, defaults left out."""
    return dict(op.signature.bind(*sample.args, **sample.kwargs).arguments)


def differentiable(arguments: Mapping[str, Any], sample: Sample) -> list[str]:
    """The arguments that get a gradient."""
    return [
        n for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point() and n not in sample.frozen
    ]


def with_gradients(arguments: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The same tensors with the same strides; those named require a gradient, the others do not."""
    return {n: v.detach().requires_grad_(n in names) if isinstance(v, Tensor) else v for n, v in arguments.items()}


def leaves(value: Any, name: str = "output") -> dict[str, Tensor]:
    """Name → tensor for a result that is a tensor, a tuple or a named tuple, nested as it likes."""
    if isinstance(value, Tensor):
        return {name: value}
    if not isinstance(value, tuple):
        raise TypeError(f"{name} must be a tensor or a tuple, got {type(value).__name__}")
    fields = getattr(value, "_fields", range(len(value)))
    return {k: t for field, part in zip(fields, value, strict=True) for k, t in leaves(part, f"{name}.{field}").items()}


def in_float64(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Floating tensors, and dtypes given as options, widened to float64."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().double()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    return {name: widen(value) for name, value in arguments.items()}


def shape_of(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
