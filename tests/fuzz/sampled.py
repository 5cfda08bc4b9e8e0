# SPDX-License-Identifier: Apache-2.0
"""How calls are drawn of an op that has no strategy of its own: its samples with other dtypes, strides and magnitudes."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from conformance.cases import arguments_of, differentiable, samples, size, word
from fuzz.calls import Limits, Strategy
from fuzz.drawing import Draw, Example, example, floats
from liger_core import Op

CPU = torch.device("cpu")


def of_samples(op: Op[..., Any]) -> Strategy:
    def strategy(draw: Draw, limits: Limits) -> Example:
        dtype = getattr(torch, draw(st.sampled_from(limits.dtypes)))
        small = [sample for sample in samples(op, CPU, dtype) if size(op, CPU, sample.name) <= limits.elements]
        sample = small[draw(st.integers(0, len(small) - 1))]
        arguments = arguments_of(op, sample)
        drawn = dict(arguments)
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                drawn[name] = floats(draw, tuple(value.shape), word(value.dtype))
        return example(draw, drawn, differentiable(arguments, sample))

    return strategy
