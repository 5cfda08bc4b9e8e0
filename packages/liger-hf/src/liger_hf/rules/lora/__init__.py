# SPDX-License-Identifier: Apache-2.0
"""Linear layers with a LoRA adapter become lora_linear."""
