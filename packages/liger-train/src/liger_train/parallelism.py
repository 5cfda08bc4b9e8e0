# SPDX-License-Identifier: Apache-2.0
"""The mesh of a setup's ranks: data-parallel, context-parallel and tensor-parallel ones."""

from __future__ import annotations

from accelerate import ParallelismConfig

from liger_train.setup import Setup


def parallelism(setup: Setup) -> ParallelismConfig | None:
    """The mesh as accelerate describes it; None if all ranks are data-parallel."""
    if setup.tp * setup.cp == 1:
        return None
    return ParallelismConfig(tp_size=setup.tp, cp_size=setup.cp, dp_shard_size=setup.replicas)
