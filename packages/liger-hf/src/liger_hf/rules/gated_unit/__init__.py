# SPDX-License-Identifier: Apache-2.0
"""Gated units and experts become swiglu or geglu."""
