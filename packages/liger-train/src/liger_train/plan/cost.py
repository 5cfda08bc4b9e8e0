# SPDX-License-Identifier: Apache-2.0
"""Predict the memory and the time of a run on one GPU before it starts, in a sentence."""

from __future__ import annotations

from liger_bench.printing import size
from liger_core.errors import OptionError
from liger_train.plan.estimate import Rates, estimate
from liger_train.plan.step import predict
from liger_train.setup import Setup

# By a part of the GPU's name: matmuls and memory as `liger bench` measured them. A collective needs more than one GPU.
RATES = {"H200": Rates(matmul=750e12, memory=4.2e12, attention=375e12, links=1, hosts=1)}


def sentence(setup: Setup, name: str, has: int) -> str | None:
    """Predicted peak, and time where the rates of this GPU are known; None for a model that has no plan.

    name, has  the name of the GPU, and its memory in bytes
    """
    try:
        prediction = predict(setup)
    except OptionError:
        return None
    limit = min(has, setup.memory_limit or has)
    words = f"Predicted: a peak of {size(prediction.peak_bytes)} of {size(limit)}"
    rates = next((rates for gpu, rates in RATES.items() if gpu in name), None)
    if rates is not None:
        seconds = estimate(setup, rates, prediction.trainable_parameters).seconds
        tokens = setup.batch * setup.sequence * setup.accumulation / seconds
        words += f", and about {seconds:,.0f} s per step ({tokens:,.0f} tokens/s)"
    if prediction.fits(limit):
        return words + "."
    return (
        f"{words}, which does not fit; `liger plan` with the same options and --memory-limit "
        f"{size(limit).replace(' ', '')} looks for what does."
    )
