# SPDX-License-Identifier: Apache-2.0
"""Liger's ops in Hugging Face Transformers models: found by structure, checked, reversible."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_hf import compat, trainers
    from liger_hf.application import apply
    from liger_hf.auto import AutoLigerModelForCausalLM
    from liger_hf.callback import LigerCallback
    from liger_hf.errors import LogitsError, ModelError
    from liger_hf.four_bits import quantize_experts
    from liger_hf.inspection import inspect
    from liger_hf.report import Report, Row
    from liger_hf.rule import Candidate, Found, Rule
    from liger_hf.rules.head.lazy_logits import LazyLogits
    from liger_hf.rules.head.log_prob import head_log_prob
    from liger_hf.trl import TRLHead, use_in_trl

__version__ = "0.1.0"

__all__ = [
    "AutoLigerModelForCausalLM",
    "Candidate",
    "Found",
    "LazyLogits",
    "LigerCallback",
    "LogitsError",
    "ModelError",
    "Report",
    "Row",
    "Rule",
    "TRLHead",
    "apply",
    "compat",
    "head_log_prob",
    "inspect",
    "quantize_experts",
    "trainers",
    "use_in_trl",
]

HOMES = {
    "AutoLigerModelForCausalLM": "auto",
    "Candidate": "rule",
    "Found": "rule",
    "LazyLogits": "rules.head.lazy_logits",
    "LigerCallback": "callback",
    "LogitsError": "errors",
    "ModelError": "errors",
    "Report": "report",
    "Row": "report",
    "Rule": "rule",
    "TRLHead": "trl",
    "apply": "application",
    "head_log_prob": "rules.head.log_prob",
    "inspect": "inspection",
    "quantize_experts": "four_bits",
    "use_in_trl": "trl",
}


def __getattr__(name: str) -> Any:
    """Load on first use: every op and the `liger` command load plugins, and importing Transformers takes seconds."""
    if name in ("compat", "trainers"):
        return importlib.import_module(f"liger_hf.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'liger_hf' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"liger_hf.{HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
