# SPDX-License-Identifier: Apache-2.0
"""Norms become rms_norm or layer_norm."""
