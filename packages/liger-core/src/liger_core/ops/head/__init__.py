# SPDX-License-Identifier: Apache-2.0
"""A head and what follows it, without ever holding all the logits: one walk over tiles of logits, which the ops fill
with their formulas."""
