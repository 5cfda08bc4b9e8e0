# SPDX-License-Identifier: Apache-2.0
"""The implementations that a sweep compares (Transformers, Liger, another library), each as options of a run."""

import importlib
from typing import Any

# The value of --liger with which another library patches the model.
PEER = "liger-kernel"
IMPLEMENTATIONS = {
    "hf": {"liger": "none"},
    "hf-compiled": {"liger": "none", "compile": "default"},
    "liger": {"liger": "all"},
    "liger-compiled": {"liger": "all", "compile": "default"},
    PEER: {"liger": PEER},
}


def patch_by_peer(model: Any) -> None:
    """Patch a model with liger-kernel's own function and defaults, as the Transformers Trainer does."""
    patches: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    patches._apply_liger_kernel_to_instance(model=base)
