# SPDX-License-Identifier: Apache-2.0
"""Facts about add_rms_norm that its samples do not say."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz import formulas
from liger_core import add_rms_norm
from ops.agreement import disagreements, leaf

Named = dict[str, Tensor]


@pytest.fixture
def arguments(device: torch.device) -> Named:
    return {"x": leaf(6, 40, device=device), "residual": leaf(6, 40, device=device), "weight": leaf(40, device=device)}


def test_what_is_normalized_is_the_rounded_sum(device: torch.device) -> None:
    # In bfloat16 256 + 1 is 256. Among 128s the norm of 256 is 1.9547, that of 257 1.9619, which differ in bfloat16.
    x, residual = torch.zeros(1, 64), torch.full((1, 64), 128.0)
    x[0, 0], residual[0, 0] = 1.0, 256.0
    normed, summed = add_rms_norm(*(t.to(device, torch.bfloat16) for t in (x, residual)))
    assert (float(summed[0, 0]), float(normed[0, 0])) == (256.0, 1.953125)


def test_the_gradients_that_a_backward_leaves_are_tensors_of_their_own(arguments: Named) -> None:
    normed, summed = add_rms_norm(**arguments)
    (normed.sin().sum() + summed.cos().sum()).backward()
    before = arguments["residual"].grad.clone()
    arguments["x"].grad.zero_()
    assert torch.equal(arguments["residual"].grad, before)


def test_a_gradient_that_grows_by_other_uses_does_not_grow_for_the_other_input(arguments: Named) -> None:
    # Both inputs are used once more, so that autograd adds to the gradient that they share.
    def twice(call: Any) -> Any:
        def used(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            x, residual = x * 1.5, residual * 0.5
            normed, summed = call(x, residual, weight)
            return normed, summed, 3.0 * x, 5.0 * residual

        return used

    assert disagreements(twice(add_rms_norm), twice(formulas.add_rms_norm), **arguments) == []


def test_writing_to_the_sum_before_backward_is_noticed_or_harmless(arguments: Named) -> None:
    # Harmless where the backward pass begins from the arguments.
    def overwritten(**given: Tensor) -> Tensor:
        normed, summed = add_rms_norm(**given)
        with torch.no_grad():
            summed.add_(1.0)
        return normed

    try:
        found = disagreements(overwritten, lambda **given: formulas.add_rms_norm(**given)[0], **arguments)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        found = []
    assert found == []
