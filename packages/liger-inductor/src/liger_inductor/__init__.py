# SPDX-License-Identifier: Apache-2.0
"""Liger's ops compiled by TorchInductor; registered through the entry point `liger_inductor.plugin`."""

__version__ = "0.1.0"

__all__: list[str] = []
