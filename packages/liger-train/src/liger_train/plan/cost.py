# SPDX-License-Identifier: Apache-2.0
"""A sentence with the predicted memory and time of a run on one GPU, printed before it starts."""

from liger_bench.printing import size
from liger_core.errors import OptionError
from liger_train.plan.estimate import Rates, estimate
from liger_train.plan.step import predict
from liger_train.setup import Setup

# Part of a GPU's name → rates, with matmul and memory as `liger bench` measured them. One GPU has no collectives. The
# attention of an H100 is that of an H200, in proportion to their matmuls.
RATES = {
    "H100": Rates(matmul=700e12, memory=3.0e12, attention=350e12, links=1, hosts=1),
    "H200": Rates(matmul=750e12, memory=4.2e12, attention=375e12, links=1, hosts=1),
}


def sentence(setup: Setup, name: str, memory: int) -> str | None:
    """Return the predicted peak, and the time if this GPU's rates are known; None for a model that cannot be planned.

    name, memory  the name of the GPU, and its memory in bytes
    """
    try:
        prediction = predict(setup)
    except OptionError:
        return None
    limit = min(memory, setup.memory_limit or memory)
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
        f"{size(limit).replace(' ', '')} finds a setup that does."
    )
