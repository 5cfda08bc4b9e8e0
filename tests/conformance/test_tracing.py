# SPDX-License-Identifier: Apache-2.0
"""Custom ops, torch.compile and fake tensors: what traces a call sees what eager Python does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from conformance.cases import Case, leaves, with_gradients
from conformance.running import Trial, run
from liger_core import use


class Recorder(TorchDispatchMode):
    """Keeps every call of a custom op of ours, with detached arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("liger"):
            self.calls.append((func, *tree_map_only(Tensor, Tensor.detach, (tuple(args), dict(kwargs or {})))))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_every_custom_op_that_a_sample_reaches_passes_opcheck(float32_case: Case) -> None:
    trial = Trial(float32_case)
    with Recorder() as recorder:
        trial.run()
    failed = []
    for func, args, kwargs in recorder.calls:
        try:
            torch.library.opcheck(func, args, kwargs)
        except torch.testing._internal.optests.OpCheckError as error:
            failed.append(f"{func}: {error}")
    assert failed == []


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiling_breaks_no_graph_and_changes_no_result(form_case: Case) -> None:
    trial = Trial(form_case)
    with use(form_case.backend, only=[form_case.op]):
        compiled = torch.compile(lambda given: form_case.op(**given), fullgraph=True, backend="aot_eager")
        got = run(compiled, trial.arguments, trial.names, trial.reference.cotangents)
    assert trial.complaints(got) == []


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(form_case: Case) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    trial = Trial(form_case)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in trial.arguments.items()}
        outputs = leaves(form_case.call(with_gradients(fakes, trial.names)))
    real = trial.run().outputs
    assert {n: (t.shape, t.dtype, t.device) for n, t in outputs.items()} == {n: (t.shape, t.dtype, t.device) for n, t in real.items()}
