# SPDX-License-Identifier: Apache-2.0
"""Norms of queries and keys and the rotary embedding after them become qk_norm_rope."""
