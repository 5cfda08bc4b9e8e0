# SPDX-License-Identifier: Apache-2.0
"""DTensors: whatever the placements of its arguments are, an op has the outputs and gradients of one process."""

import pytest
import torch

from conformance.placed import PARTS, accuracy
from conformance.sharded import judge_samples
from forks import on_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", [2, 4], ids=["mesh_of_2", "mesh_of_2_by_2"])
def test_ops_on_dtensors_are_as_accurate_as_on_one_process(
    ranks: int, part: int, device: torch.device, pytestconfig: pytest.Config
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    backend = pytestconfig.getoption("--backend") or "reference"
    # How arguments are placed does not depend on the backend, and the reference has every kind of call, way and mesh.
    interpreted = backend != "reference" and device.type == "cpu"
    if interpreted and ranks > 2:
        pytest.skip("placements do not depend on the backend; the reference has this mesh")
    on_ranks(ranks, judge_samples, device.type, accuracy, backend, torch.float32, part, not interpreted)
