# SPDX-License-Identifier: Apache-2.0
"""The constants of mathematics and of float32 that kernels share."""

import math

import torch
import triton.language as tl

# e^x = 2^(x · LOG2E) and log x = log2(x) · LN2. The interpreter multiplies by a constexpr only from the right.
LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
# Running maxima begin at the lowest finite number: a masked lane or a class at -∞ then never gives ∞ - ∞.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
