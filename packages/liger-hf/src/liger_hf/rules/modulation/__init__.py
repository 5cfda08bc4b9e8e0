# SPDX-License-Identifier: Apache-2.0
"""Norms whose rows a network scales and shifts become modulated_layer_norm or modulated_rms_norm."""
