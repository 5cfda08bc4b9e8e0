# SPDX-License-Identifier: Apache-2.0
"""Squared ReLUs become relu_squared."""
