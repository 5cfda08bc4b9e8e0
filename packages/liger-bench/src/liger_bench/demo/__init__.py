# SPDX-License-Identifier: Apache-2.0
"""`liger demo`: one training on real text, plain and with Liger, side by side."""
