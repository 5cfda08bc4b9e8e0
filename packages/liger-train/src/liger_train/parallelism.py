# SPDX-License-Identifier: Apache-2.0
"""The mesh of replicas, and of data-parallel, context-parallel and tensor-parallel ranks."""

from __future__ import annotations

from accelerate import ParallelismConfig

from liger_train.setup import Setup


def parallelism(setup: Setup) -> ParallelismConfig | None:
    """Return the mesh of a setup's ranks, or None if all ranks are data-parallel in one way."""
    sizes = {"dp_replicate_size": setup.replicate, "tp_size": setup.tp, "cp_size": setup.cp}
    if max(sizes.values()) == 1:
        return None
    return ParallelismConfig(**sizes, dp_shard_size=setup.replicas // setup.replicate)
