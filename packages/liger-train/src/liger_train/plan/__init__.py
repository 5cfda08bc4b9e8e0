# SPDX-License-Identifier: Apache-2.0
"""`liger plan`: the memory of a training run, predicted on fake tensors before anything is allocated."""
