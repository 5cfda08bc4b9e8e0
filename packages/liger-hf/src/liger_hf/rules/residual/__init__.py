# SPDX-License-Identifier: Apache-2.0
"""A sum and the norm after it become add_rms_norm or add_layer_norm."""
