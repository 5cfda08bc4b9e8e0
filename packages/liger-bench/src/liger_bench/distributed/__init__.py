# SPDX-License-Identifier: Apache-2.0
"""`liger bench distributed`: training runs on several GPUs, with and without Liger."""
