# SPDX-License-Identifier: Apache-2.0
"""Training runs: `liger train` does them, `liger plan` predicts their memory, and `liger report` draws what came of them."""

__version__ = "0.1.0"
