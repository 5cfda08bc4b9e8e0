# SPDX-License-Identifier: Apache-2.0
"""`liger train`: trainings of Hugging Face models on real text, with every memory technique as a flag."""
