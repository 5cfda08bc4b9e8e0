# SPDX-License-Identifier: Apache-2.0
"""`liger bench distributed`: trainings on several GPUs, plain and with Liger."""
