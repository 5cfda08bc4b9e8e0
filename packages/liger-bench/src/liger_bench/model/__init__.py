# SPDX-License-Identifier: Apache-2.0
"""`liger bench model`: whole models end to end, plain, compiled, by a peer and with Liger."""
