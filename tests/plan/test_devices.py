# SPDX-License-Identifier: Apache-2.0
"""CPU tensors stand in for those of a GPU: they get what a GPU's tensors would get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from liger_core import swiglu
from liger_core.plugins import registry
from liger_train.plan.devices import choosing_as_on

X = torch.randn(4, 8)
BACKEND = """
    import liger_core
    from liger_core import Backend, hookimpl

    def swiglu(gate, up=None, *, limit=None, alpha=1.0, shift=0.0, gate_scale=1.0, scale=1.0, overwrite=False):
        return liger_core.swiglu.reference(gate, up) + 1

    @hookimpl
    def liger_backends():
        return [Backend("third", ("cuda",), 1000, {liger_core.swiglu: swiglu}, OPTIONS)]
"""

Install = Callable[[str, str], Path]


def test_cpu_tensors_stand_in_for_those_of_a_gpu(install: Install) -> None:
    install("third", BACKEND.replace("OPTIONS", "supports_fake_tensors=True"))
    with choosing_as_on("cuda", "cpu") as backends:
        assert backends[-1] == "third"
        assert torch.equal(swiglu(X, X), swiglu.reference(X, X) + 1)
    assert torch.equal(swiglu(X, X), swiglu.reference(X, X))


def test_what_stands_in_need_not_be_able_to_run(install: Install) -> None:
    """Where there is no GPU, Triton's backend is unavailable, but what it would allocate is known."""
    install("third", BACKEND.replace("OPTIONS", "unavailable=lambda: 'broken', supports_fake_tensors=True"))
    assert "third" in registry().unavailable
    with choosing_as_on("cuda", "cpu"):
        assert torch.equal(swiglu(X, X), swiglu.reference(X, X) + 1)


def test_a_backend_without_fake_tensors_does_not_stand_in(install: Install) -> None:
    install("third", BACKEND.replace("OPTIONS", "supports_fake_tensors=False"))
    with choosing_as_on("cuda", "cpu") as backends:
        assert "third" not in backends
