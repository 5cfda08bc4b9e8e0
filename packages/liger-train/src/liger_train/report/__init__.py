# SPDX-License-Identifier: Apache-2.0
"""`liger report`: charts and tables of the results of `liger train` and `liger bench`, and of nothing else."""
