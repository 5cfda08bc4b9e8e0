# SPDX-License-Identifier: Apache-2.0
"""Output head and loss become linear_cross_entropy."""
