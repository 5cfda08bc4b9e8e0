# SPDX-License-Identifier: Apache-2.0
"""Facts of embedding that the conformance suite cannot know."""

import sys

import pytest
import torch

from liger_core import embedding


def test_a_frequent_row_gets_all_of_its_gradient(device: torch.device) -> None:
    # A sum in bfloat16 stops growing at 256.
    dtype = torch.bfloat16
    weight = torch.zeros(3, 4, dtype=dtype, device=device, requires_grad=True)
    index = torch.ones(300, dtype=torch.int64, device=device)
    embedding(index, weight).backward(torch.ones(300, 4, dtype=dtype, device=device))
    assert torch.equal(weight.grad[:, 0].float(), torch.tensor([0.0, 300.0, 0.0], device=device))


@pytest.mark.parametrize("compared", [True, False], ids=["compared", "sorted"])
@pytest.mark.parametrize("count", [1, 16, 255, 257, 700])
def test_rows_are_summed_however_many_indices_there_are(
    count: int, compared: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compared and (kernels := sys.modules.get("liger_triton.embedding")):
        monkeypatch.setattr(kernels, "COMPARED", 0)
    weight = torch.zeros(40, 3, device=device, requires_grad=True)
    index = torch.randint(37, (count,), device=device)
    given = torch.randint(9, (count, 3), device=device).float()
    embedding(index, weight).backward(given)
    assert torch.equal(weight.grad, torch.zeros_like(weight).index_add(0, index, given))


def test_an_index_out_of_range_on_a_gpu_gives_nan_and_no_gradient(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("an error on the CPU")
    weight = torch.randn(3, 4, device=device, requires_grad=True)
    index = torch.tensor([-1, 2, 3], device=device)
    y = embedding(index, weight)
    assert y.isnan().all(-1).tolist() == [True, False, True]
    y.backward(torch.ones_like(y))
    assert weight.grad.sum(-1).tolist() == [0.0, 0.0, 4.0]
