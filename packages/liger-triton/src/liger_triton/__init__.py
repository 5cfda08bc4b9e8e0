# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for Liger's ops; registered through the entry point `liger_triton.plugin`."""

__version__ = "0.1.0"

__all__: list[str] = []
