# SPDX-License-Identifier: Apache-2.0
"""`liger plan`: the memory of a training, predicted on fake tensors before anything is allocated."""
