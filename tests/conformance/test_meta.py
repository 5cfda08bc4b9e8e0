# SPDX-License-Identifier: Apache-2.0
"""Devices that hold no values: tensors on the meta device, and a default device that is not that of the tensors."""

import pytest
import torch
from torch import Tensor

from conformance.cases import Case
from conformance.running import Trial, differences, run
from liger_core.plugins import registry


@pytest.mark.slow
def test_meta_tensors_give_the_shapes_and_dtypes_of_real_ones(form_case: Case) -> None:
    if "meta" not in registry().backends[form_case.backend].device_types:
        pytest.skip(f"{form_case.backend} does not take meta tensors")
    trial = Trial(form_case)
    nowhere = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in trial.arguments.items()}
    cotangents = {n: v.to("meta") for n, v in trial.reference.cotangents.items()}
    got = run(form_case.call, nowhere, trial.names, cotangents)
    for values, real in ((got.outputs, trial.reference.outputs), (got.gradients, trial.reference.gradients)):
        assert {n: t is not None and (t.shape, t.dtype, t.device.type) for n, t in values.items()} == {
            n: t is not None and (t.shape, t.dtype, "meta") for n, t in real.items()
        }


@pytest.mark.slow
def test_the_default_device_is_not_used(form_case: Case) -> None:
    trial = Trial(form_case)
    expected = trial.run()
    with torch.device("meta"):
        found = trial.run()
    trial.expect(differences(found, expected))
