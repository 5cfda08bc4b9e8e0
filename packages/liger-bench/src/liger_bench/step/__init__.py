# SPDX-License-Identifier: Apache-2.0
"""`liger bench step`: training steps of the kinds that users run, beside peers and the arithmetic limit."""
