# SPDX-License-Identifier: Apache-2.0
"""`liger train`: training runs of Hugging Face models on text, with every memory-saving technique as an option."""
