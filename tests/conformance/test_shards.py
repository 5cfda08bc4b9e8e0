# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is sharded over processes: outputs and gradients as those of the op on one process."""

import pytest
import torch

from conformance.cases import LOW
from conformance.sharded import accuracy, judge_samples
from forks import on_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "sharding"), [(2, "even"), (2, "uneven"), (4, "uneven")])
def test_a_sharded_vocabulary_is_as_accurate_as_a_whole_one(
    sharded_op: str, ranks: int, sharding: str, device: torch.device, pytestconfig: pytest.Config
) -> None:
    backend = pytestconfig.getoption("--backend") or "reference"
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    interpreted = backend != "reference" and device.type == "cpu"
    if interpreted and (ranks, sharding) != (2, "uneven"):
        pytest.skip("what ranks exchange does not depend on the backend; the reference has all shardings")
    # An interpreter takes seconds a sample; what dtypes change in a kernel shows on one process.
    dtypes = [torch.bfloat16] if interpreted else list(LOW)
    on_ranks(ranks, judge_samples, device.type, accuracy, sharded_op, backend, dtypes, sharding)
