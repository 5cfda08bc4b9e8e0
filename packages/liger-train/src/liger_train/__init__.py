# SPDX-License-Identifier: Apache-2.0
"""Training runs: `liger train` runs them, `liger plan` predicts their memory, `liger report` charts their results."""

__version__ = "0.1.0"
