# SPDX-License-Identifier: Apache-2.0
"""`liger bench model`: whole models end to end, eager, compiled, by another library and with Liger."""
