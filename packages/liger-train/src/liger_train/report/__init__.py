# SPDX-License-Identifier: Apache-2.0
"""`liger report`: charts and tables drawn from the results of `liger train`, and from nothing else."""
