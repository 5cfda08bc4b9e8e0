# SPDX-License-Identifier: Apache-2.0
"""Gated MLPs and experts become swiglu or geglu."""
