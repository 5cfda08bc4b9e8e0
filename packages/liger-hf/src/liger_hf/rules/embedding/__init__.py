# SPDX-License-Identifier: Apache-2.0
"""Embeddings become embedding, where they are asked for."""
