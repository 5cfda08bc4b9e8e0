# SPDX-License-Identifier: Apache-2.0
"""Random calls of every op and backend against formulas in float64 that are written apart from the references.

Without --examples the calls are the same every time and take seconds, as one of the tests; `nox -s fuzz` draws as many
as requested.
"""

import inspect
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from conformance.cases import implementations
from conftest import device_of
from fuzz import calls, formulas
from fuzz.calls import Limits
from fuzz.drawing import FLOATS, Example
from fuzz.judging import Declined, complaints
from fuzz.sampled import of_samples
from liger_core import Op
from liger_core.builtin import CATALOGUE

pytestmark = pytest.mark.slow

# Op → how its calls are drawn.
STRATEGIES = {op.name: vars(calls).get(op.name) or of_samples(op) for op in CATALOGUE}

Implementation = tuple[Op[..., Any], str, Callable[..., Any]]
# Calls without --examples: of PyTorch; of kernels in an interpreter, where a program takes milliseconds; of heads
# there, which run many of them.
QUICK, FEW, FEW_OF_HEADS = 200, 20, 8
INTERPRETED, QUICK_INTERPRETED = Limits(FLOATS, elements=4_200, rows=33), Limits(FLOATS, elements=2_100, rows=9)
PATIENT = partial(settings, deadline=None, suppress_health_check=list(HealthCheck))
# Seconds between two lines of progress.
INTERVAL = 10.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        found = implementations(device_of(metafunc.config), metafunc.config.getoption("--backend"))
        drawn = [triple for triple in found if triple[0].name in STRATEGIES]
        metafunc.parametrize("implementation", drawn, ids=[f"{backend}-{op.name}" for op, backend, _ in drawn])


def test_random_calls_are_as_accurate_as_plain_pytorch(
    implementation: Implementation, device: torch.device, pytestconfig: pytest.Config
) -> None:
    op, backend, function = implementation
    interpreted = device.type == "cpu" and function is not op.reference
    asked, number = pytestconfig.getoption("--examples"), pytestconfig.getoption("--seed")
    limits = Limits((*FLOATS, "float64") if function is op.reference else FLOATS)
    if interpreted:
        limits = INTERPRETED if asked else QUICK_INTERPRETED
    quick = QUICK if not interpreted else FEW_OF_HEADS if OF_RANKS & set(op.signature.parameters) else FEW
    progress = Progress(f"{backend}-{op.name}", asked or quick, pytestconfig, show=asked is not None)

    def check(example: Example) -> None:
        try:
            found = complaints(op, backend, example, device)
        except Declined:
            progress.declined += 1
            found = []
        progress.step()
        assert not found, "\n".join(found)

    check.__name__ = check.__qualname__ = f"{backend}_{op.name}"
    drawn = given(st.composite(STRATEGIES[op.name])(limits))(check)
    # The same calls every time, or a series that the seed begins; what failed before comes first.
    chosen = seed(number)(drawn)
    again = f"--backend {backend} -k {backend}-{op.name} --examples {progress.total} --seed {number}"
    kept = DirectoryBasedExampleDatabase(pytestconfig.rootpath / ".hypothesis" / "fuzz")
    try:
        PATIENT(max_examples=progress.total, database=kept if asked else None)(chosen)()
    except BaseException as error:
        error.add_note(f"To run it again: python -m pytest tests/fuzz --device {device.type} {again}")
        raise
    assert progress.declined < progress.total, f"{backend} declined every call"


# Parameters that take several processes: tests/conformance/test_shards.py.
OF_RANKS = {"vocab"}


@pytest.mark.parametrize("op", [op for op in CATALOGUE if op.name in vars(formulas)], ids=lambda op: op.name)
def test_a_formula_has_the_parameters_of_its_op(op: Op[..., Any]) -> None:
    formula = vars(formulas)[op.name]
    want, got = (
        [(p.name, p.default) for p in signature.parameters.values()]
        for signature in (op.signature, inspect.signature(formula))
    )
    want = [(name, default) for name, default in want if name not in OF_RANKS]
    assert got == want, f"{op.name}: its formula must have the parameters and defaults of the op"


def test_some_ops_have_strategies_and_formulas() -> None:
    written = {op.name for op in CATALOGUE}
    assert len(written & vars(calls).keys()) > 30
    assert len(written & vars(formulas).keys()) > 30


@pytest.mark.parametrize("op", CATALOGUE, ids=lambda op: op.name)
def test_every_parameter_is_drawn_with_more_than_its_default(op: Op[..., Any]) -> None:
    missing = set(op.signature.parameters) - OF_RANKS

    @PATIENT(max_examples=1000, derandomize=True, phases=[Phase.generate])
    @given(st.composite(STRATEGIES[op.name])(Limits(FLOATS)))
    def collect(example: Example) -> None:
        missing.difference_update(n for n, v in example.arguments.items() if v != op.signature.parameters[n].default)
        if not missing:
            raise StopIteration

    with suppress(StopIteration):
        collect()
    wanted = "its strategy in tests/fuzz/calls.py must draw every parameter, got no other than the default of"
    assert not missing, f"{op.name}: {wanted} {missing}"


class Progress:
    """The progress of a series of calls: a line now and then, even if output is captured."""

    def __init__(self, name: str, total: int, config: pytest.Config, *, show: bool) -> None:
        self.name, self.total, self.show = name, total, show
        self.done = self.declined = 0
        self.began = self.last = time.monotonic()
        self.capture = config.pluginmanager.getplugin("capturemanager")

    def step(self) -> None:
        self.done += 1
        now = time.monotonic()
        if not self.show or (now - self.last < INTERVAL and self.done != self.total):
            return
        self.last = now
        with self.capture.global_and_fixture_disabled():
            declined = f", {self.declined} declined" if self.declined else ""
            words = f"\n{self.name}: {self.done} of {self.total} calls{declined}, {now - self.began:.0f} s"
            print(words, end="", file=sys.__stderr__, flush=True)
