# SPDX-License-Identifier: Apache-2.0
"""Generates the parametrization of the conformance suite, and guards new memory."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conformance.cases import (
    Case,
    cases,
    frozen_cases,
    implementations,
    layout_cases,
    lone_cases,
    mixed_cases,
    output_cases,
    takes_minutes,
    variation_cases,
)
from conformance.guarding import GuardedMemory
from conformance.running import KernelCall
from conftest import device_of
from liger_core.kernels import Kernel
from liger_core.plugins import registry

KINDS = {f"{kind}_case": kind for kind in ("repeated", "float32", "form", "pattern", "exact")} | {"case": "all"}
TAKES_MINUTES = pytest.mark.skip(reason="a large sample takes an interpreter minutes; its accuracy is tested")
# A case and the variation of it that is tested.
PAIRS = {
    "frozen_case": frozen_cases,
    "lone_case": lone_cases,
    "mixed_case": mixed_cases,
    "output_case": output_cases,
    "layout_case": layout_cases,
    "variation_case": variation_cases,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device, only = device_of(metafunc.config), metafunc.config.getoption("--backend")
    torch.manual_seed(0)
    for fixture, kind in KINDS.items():
        if fixture in metafunc.fixturenames:
            # Accuracy looks at every case; what else is checked does not change with the size of a sample.
            found = [(case, case, case.id) for case in cases(device, only, kind)]
            metafunc.parametrize(fixture, marked(found, fixture != "case"), indirect=fixture == "case")
    for fixture, pairs in PAIRS.items():
        if fixture in metafunc.fixturenames:
            chosen = [(pair, pair[0], f"{pair[0].id}-{pair[1]}") for pair in pairs(device, only)]
            metafunc.parametrize(fixture, marked(chosen, True))
    if "implementation" in metafunc.fixturenames:
        triples = list(implementations(device, only))
        metafunc.parametrize("implementation", triples, ids=[f"{backend}-{op.name}" for op, backend, _ in triples])
    if "misuse" in metafunc.fixturenames:
        wrong = [(op, backend, m.name) for op, backend, _ in implementations(device, only) for m in op.misuses(device)]
        metafunc.parametrize("misuse", wrong, ids=[f"{backend}-{op.name}-{name}" for op, backend, name in wrong])
    if "sharded_op" in metafunc.fixturenames:
        sharded = [op.name for op in registry().ops.values() if "vocab" in op.signature.parameters]
        metafunc.parametrize("sharded_op", sharded)
    if "op" in metafunc.fixturenames:
        ops = list(registry().ops.values())
        metafunc.parametrize("op", ops, ids=[op.name for op in ops])


def marked(found: list[tuple[Any, Case, str]], leaves_out: bool) -> list[Any]:
    """Parameters from (value, case, id); those that take minutes are skipped if `leaves_out`."""
    return [
        pytest.param(value, id=name, marks=TAKES_MINUTES if leaves_out and takes_minutes(case) else ())
        for value, case, name in found
    ]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Print what a sample is for beside an error that an implementation raises."""
    try:
        return (yield)
    except Exception as error:
        for value in pyfuncitem.funcargs.values():
            case = value[0] if isinstance(value, tuple) and value else value
            if isinstance(case, Case) and not isinstance(error, AssertionError):
                error.add_note(f"This sample is for: {case.sample().why}")
        raise


@pytest.fixture(autouse=True)
def _kernels(kernels_when_compiled: None) -> None:
    """Applied to every test here."""


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    """Past a number of programs torch.compile runs a function uncompiled, which gives other bits; those of other
    modules do not count."""
    # Importing the compiler takes seconds.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def case(request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]) -> Case:
    record_property("compared", request.param.key)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def guarded_memory() -> Iterator[GuardedMemory]:
    """New memory holds NaN (integers: a sentinel) between guard bytes: unwritten elements and out-of-bounds writes
    show."""
    with GuardedMemory().installed() as memory:
        yield memory
    memory.check("the call")


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
    """Every execution of a `Kernel` since the test began."""
    calls: list[KernelCall] = []
    execute = Kernel.execute

    def kept(kernel: Kernel, args: Any, allocate: Any) -> Any:
        outputs = execute(kernel, args, allocate)
        calls.append(KernelCall(kernel, args, outputs))
        return outputs

    monkeypatch.setattr(Kernel, "execute", kept)
    return calls
