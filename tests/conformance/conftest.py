# SPDX-License-Identifier: Apache-2.0
"""Generates the parametrisation of the conformance suite, and poisons new memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import Case, cases, frozen_cases, implementations, output_cases, takes_minutes
from conftest import device_of
from liger_core.plugins import registry

KINDS = {"case": "all", "light_case": "all", "float32_case": "float32", "form_case": "form", "exact_case": "exact"}
TAKES_MINUTES = pytest.mark.skip(reason="a large sample takes an interpreter minutes; its accuracy is tested")
# A value that no kernel computes by accident.
SENTINEL = -7_777_777


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device, only = device_of(metafunc.config), metafunc.config.getoption("--backend")
    torch.manual_seed(0)
    for fixture, kind in KINDS.items():
        if fixture in metafunc.fixturenames:
            found = list(cases(device, only, kind))
            # Accuracy looks at every case; what else is checked does not change with the size of a sample.
            slow = [fixture != "case" and takes_minutes(case) for case in found]
            marked = [pytest.param(c, marks=TAKES_MINUTES) if s else c for c, s in zip(found, slow, strict=True)]
            metafunc.parametrize(fixture, marked, ids=[case.id for case in found], indirect=True)
    for fixture, pairs in (("frozen_case", frozen_cases), ("output_case", output_cases)):
        if fixture in metafunc.fixturenames:
            chosen = list(pairs(device, only))
            metafunc.parametrize(fixture, chosen, ids=[f"{case.id}-{name}" for case, name in chosen])
    if "implementation" in metafunc.fixturenames:
        triples = list(implementations(device, only))
        metafunc.parametrize("implementation", triples, ids=[f"{backend}-{op.name}" for op, backend, _ in triples])
    if "misuse" in metafunc.fixturenames:
        wrong = [(op, backend, m.name) for op, backend, _ in implementations(device, only) for m in op.misuses(device)]
        metafunc.parametrize("misuse", wrong, ids=[f"{backend}-{op.name}-{name}" for op, backend, name in wrong])
    if "op" in metafunc.fixturenames:
        ops = list(registry().ops.values())
        metafunc.parametrize("op", ops, ids=[op.name for op in ops])


@pytest.fixture(autouse=True)
def _kernels(kernels_when_compiled: None) -> None:
    """For every test here."""


@pytest.fixture
def case(request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]) -> Case:
    record_property("compared", request.param.key)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def light_case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def float32_case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def form_case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def exact_case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.device.type == "meta" or tensor.dtype == torch.bool:
            return tensor
        with torch.no_grad():
            value = float("nan") if tensor.is_floating_point() else SENTINEL % torch.iinfo(tensor.dtype).max
            return tensor.fill_(value)

    return poisoned


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory holds NaN (integers: a sentinel), so that an element that nobody wrote is seen."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    yield
    monkeypatch.undo()
