# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections become project_streams, sinkhorn and mix_streams."""
