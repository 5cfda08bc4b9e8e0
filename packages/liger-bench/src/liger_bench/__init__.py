# SPDX-License-Identifier: Apache-2.0
"""Measurements of the Liger operators, of models and of distributed steps: time, memory and accuracy, with where and how."""

__version__ = "0.1.0"
