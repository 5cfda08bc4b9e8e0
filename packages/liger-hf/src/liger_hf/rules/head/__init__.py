# SPDX-License-Identifier: Apache-2.0
"""LM head and loss become linear_cross_entropy."""
