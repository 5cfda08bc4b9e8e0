# SPDX-License-Identifier: Apache-2.0
"""Measurements of Liger's ops, of models and of distributed steps: time, memory and accuracy."""

__version__ = "0.1.0"
