# SPDX-License-Identifier: Apache-2.0
"""Report how `apply` would change a model, without loading weights or changing anything."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from liger_core import OptionError
from liger_hf import implementations
from liger_hf.application import Names, survey
from liger_hf.configs import config_of
from liger_hf.errors import ModelError
from liger_hf.private_transformers import OFFLOADED, makes, without_weights
from liger_hf.report import REPLACEABLE, Report
from liger_hf.stand_in import default_device

CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")


def inspect(
    model: nn.Module | PretrainedConfig | str,
    *,
    only: Names = None,
    exclude: Names = None,
    verify: bool = True,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Report:
    """Report which modules `liger_hf.apply` would replace in a model, and why, without changing the model.

    model   a model, with weights or on the meta device; a config, from which a model is built without weights; or a
            preset such as tiny, a folder, a model type of Transformers or a name on the hub, whose config is used
    dtype   the dtype of a model built from a config; by default the dtype in the config
    device  where a model without weights is checked, with small random weights; by default a GPU if there is one
    only, exclude, verify  as for apply

    Raises ModelError if no model can be built from the config, and the errors that apply raises.
    """
    if isinstance(model, str):
        model = config_of(model)
    if isinstance(model, PretrainedConfig):
        model = _built(model, dtype)
    checked_on = _device(device) if isinstance(model, nn.Module) and _without_weights(model) else None
    report, _ = survey(model, "liger_hf.inspect", only, exclude, verify, checked_on, REPLACEABLE)
    assert isinstance(model, nn.Module)
    report.implementations = implementations.sentences(model)
    if checked_on is not None:
        report.notes.append(
            f"No weights were loaded: small random ones were checked, on {checked_on}, and backends are those for "
            f"{checked_on.type}."
        )
    return report


def _built(config: PretrainedConfig, dtype: torch.dtype | str | None) -> Any:
    """Build the model that the config names, or else an Auto model for the config, on the meta device."""
    kinds = (getattr(transformers, name, None) for name in config.architectures or ())
    named = next((kind for kind in kinds if kind is not None), None)
    options = {} if dtype is None else {"dtype": getattr(torch, dtype) if isinstance(dtype, str) else dtype}
    try:
        with torch.device("meta"):
            if named is not None:
                return without_weights(named, config, **options)
            autos = (getattr(transformers, name) for name in CLASSES)
            return next(auto for auto in autos if makes(auto, config)).from_config(config, **options)
    except Exception as problem:
        missing = isinstance(problem, StopIteration)
        reason = "no model belongs to it" if missing else f"{type(problem).__name__}: {problem}"
        raise ModelError(
            f"liger_hf.inspect: a model must be made from {type(config).__name__} without weights, it cannot: "
            f"{reason}; make the model yourself and inspect that"
        ) from problem


def _without_weights(model: nn.Module) -> bool:
    """Return whether all weights are on the meta device and no accelerate hook will load them."""
    offloaded = any(OFFLOADED in vars(module) for module in model.modules())
    return not offloaded and all(p.is_meta for p in model.parameters()) and next(model.parameters(), None) is not None


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return default_device()
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except Exception as problem:
        raise OptionError(
            f"liger_hf.inspect: device must be one that is here, got {str(device)!r}: {problem}"
        ) from problem
    return chosen
