# SPDX-License-Identifier: Apache-2.0
"""Liger's operators in Hugging Face Transformers models: found by structure, checked, reversible."""

from liger_hf.application import apply
from liger_hf.auto import AutoLigerModelForCausalLM
from liger_hf.errors import LogitsError, ModelError
from liger_hf.lazy_logits import LazyLogits
from liger_hf.report import Report, Row

__version__ = "0.1.0"

__all__ = ["AutoLigerModelForCausalLM", "LazyLogits", "LogitsError", "ModelError", "Report", "Row", "apply"]
