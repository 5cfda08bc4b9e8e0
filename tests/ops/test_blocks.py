# SPDX-License-Identifier: Apache-2.0
"""References that walk large inputs in blocks of rows give the same results however they are cut: no sample is as large
as a block."""

import sys

import pytest
import torch

from conformance.cases import arguments_of, differentiable
from conformance.running import run
from liger_core import Op
from liger_core.builtin import CATALOGUE
from liger_core.ops._divergence import DivergenceOptions, _blocks

IN_BLOCKS = [
    m for name, m in sys.modules.items() if name.startswith("liger_core.ops.") and hasattr(m, "REFERENCE_BLOCK")
]


@pytest.mark.slow
@pytest.mark.parametrize("op", CATALOGUE, ids=lambda op: op.name)
def test_results_do_not_depend_on_how_rows_are_cut(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    for sample in op.samples(torch.device("cpu"), torch.float64):
        arguments = arguments_of(op, sample)
        names = differentiable(arguments, sample)
        with monkeypatch.context() as patch:
            whole = run(lambda given: op.reference(**given), arguments, names)
            for module in IN_BLOCKS:
                patch.setattr(module, "REFERENCE_BLOCK", 64)
            cut = run(lambda given: op.reference(**given), arguments, names, whole.cotangents)
        for got, want in ((cut.outputs, whole.outputs), (cut.gradients, whole.gradients)):
            message = f"{sample.name}: {{}}".format
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True, msg=message)


def test_divergences_on_a_gpu_take_several_rows_of_a_large_vocabulary_at_a_time() -> None:
    logits = torch.empty(1024, 1 << 17, device="meta")
    options = DivergenceOptions.from_arguments("jsd", 0.5)
    assert len(list(_blocks(logits, logits, None, options))) == 64


def test_references_walk_in_blocks() -> None:
    found = {m.__name__.removeprefix("liger_core.ops.") for m in IN_BLOCKS}
    assert found >= {"_divergence", "_low_rank", "_token_passes"}
