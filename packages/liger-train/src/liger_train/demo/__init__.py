# SPDX-License-Identifier: Apache-2.0
"""`liger demo`: one training run on real text, with and without Liger, side by side."""
