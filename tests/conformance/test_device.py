# SPDX-License-Identifier: Apache-2.0
"""Facts that need a GPU: no host synchronization, capture in a CUDA graph, the device of the tensors."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from conformance.cases import Case, leaves, with_gradients
from conformance.running import Trial, different_bits, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def synchronization_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def _step(case: Case, trial: Trial, given: dict[str, object]) -> tuple[list[Tensor], list[Tensor | None]]:
    outputs = leaves(case.call(given))
    weights = trial.cotangents
    inputs = [given[n] for n in trial.names]
    gradients = torch.autograd.grad([outputs[n] for n in weights], inputs, list(weights.values()), allow_unused=True)
    return list(outputs.values()), list(gradients)


def test_no_call_waits_for_the_device(form_case: Case, request: pytest.FixtureRequest) -> None:
    trial = Trial(form_case)
    given = with_gradients(trial.arguments, trial.names)
    # The first call may compile kernels, which synchronizes.
    _step(form_case, trial, given)
    request.getfixturevalue("synchronization_is_an_error")
    _step(form_case, trial, given)


def test_a_cuda_graph_replays_forward_and_backward(form_case: Case) -> None:
    trial = Trial(form_case)
    given = with_gradients(trial.arguments, trial.names)
    stream = torch.cuda.Stream()
    # The inputs were made on another stream.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = _step(form_case, trial, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = _step(form_case, trial, given)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, expected, strict=True):
        assert different_bits({str(i): t for i, t in enumerate(got)}, {str(i): t for i, t in enumerate(want)}) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_tensors_on_another_than_the_current_device(form_case: Case) -> None:
    trial = Trial(form_case)
    elsewhere = {n: v.to("cuda:1") if isinstance(v, Tensor) else v for n, v in trial.arguments.items()}
    cotangents = {n: v.to("cuda:1") for n, v in trial.cotangents.items()}
    got = run(form_case.call, elsewhere, trial.names, cotangents)
    assert torch.cuda.current_device() == 0
    trial.expect(trial.complaints(got))
