# SPDX-License-Identifier: Apache-2.0
"""Experts in one module become the op experts."""
