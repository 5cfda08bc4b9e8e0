# SPDX-License-Identifier: Apache-2.0
"""Liger's ops in Hugging Face Transformers models: found by structure, checked, reversible."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_hf import compat as compat
    from liger_hf import trainers as trainers
    from liger_hf.application import apply as apply
    from liger_hf.auto import AutoLigerModelForCausalLM as AutoLigerModelForCausalLM
    from liger_hf.callback import LigerCallback as LigerCallback
    from liger_hf.errors import LogitsError as LogitsError
    from liger_hf.errors import ModelError as ModelError
    from liger_hf.four_bits import quantize_experts as quantize_experts
    from liger_hf.inspection import inspect as inspect
    from liger_hf.report import Report as Report
    from liger_hf.report import Row as Row
    from liger_hf.rule import Candidate as Candidate
    from liger_hf.rule import Found as Found
    from liger_hf.rule import Rule as Rule
    from liger_hf.rules.head.lazy_logits import LazyLogits as LazyLogits
    from liger_hf.rules.head.log_prob import head_log_prob as head_log_prob
    from liger_hf.trl import TRLHead as TRLHead
    from liger_hf.trl import use_in_trl as use_in_trl

__version__ = "0.1.0"

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
SUBMODULES = ("compat", "trainers")
__all__ = sorted([*HOMES, *SUBMODULES])


def __getattr__(name: str) -> Any:
    """Load on first use: every op and the `liger` command load plugins, and importing Transformers takes seconds."""
    if name in SUBMODULES:
        return importlib.import_module(f"liger_hf.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'liger_hf' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"liger_hf.{HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
