# SPDX-License-Identifier: Apache-2.0
"""The table of all losses with their options in docs/losses.md: `python docs/generate/loss_options.py` writes it.

Options and defaults are those of the signatures; TRL's names are below. tests/docs/test_site.py says when the table is stale,
tests/losses/test_trl.py when TRL has no such option.
"""

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import docstrings

import liger_core
from liger_bench import markdown
from liger_core import losses

PAGE = Path(__file__).parents[1] / "losses.md"
# The options of ops that change how a result is computed, not which.
COMPUTED = ("accumulate_dtype", "chunk", "budget", "pack", "main_grad", "vocab")
PAIRS = {"beta": "beta", "label_smoothing": "label_smoothing"}
# Loss → the configuration of TRL with its options, and option → TRL's name; without a name, TRL has no such option.
TRL: dict[str, tuple[str, dict[str, str]]] = {
    "dpo": (
        "DPOConfig",
        {"variant": "loss_type", **PAIRS, "length_normalized": "loss_type", "likelihood": "loss_type, loss_weights"},
    ),
    "cpo": ("CPOConfig", {"variant": "loss_type", **PAIRS, "likelihood": "cpo_alpha"}),
    "simpo": ("CPOConfig", {**PAIRS, "gamma": "simpo_gamma", "likelihood": "cpo_alpha"}),
    "orpo": ("ORPOConfig", {"odds_weight": "beta"}),
    "Likelihood": ("", {}),
    "kto": ("KTOConfig", {"beta": "beta", "baseline": "loss_type", "weights": "desirable_weight, undesirable_weight"}),
    "kto_baseline": ("", {}),
    "grpo": ("GRPOConfig", {"variant": "loss_type", "averaging": "loss_type"}),
    "ppo": ("", {}),
    "dft": ("SFTConfig", {}),
    "Clip": (
        "GRPOConfig",
        {"low": "epsilon", "high": "epsilon_high", "delta": "delta", "level": "importance_sampling_level"},
    ),
    "Cispo": ("GRPOConfig", {"high": "epsilon_high"}),
    "Sapo": ("GRPOConfig", {"positive": "sapo_temperature_pos", "negative": "sapo_temperature_neg"}),
    "Vespo": ("GRPOConfig", {"positive": "vespo_k_pos, vespo_lambda_pos", "negative": "vespo_k_neg, vespo_lambda_neg"}),
    "Penalty": (
        "GRPOConfig",
        {
            "beta": "beta",
            "unbiased": "use_bias_correction_kl",
            "level": "importance_sampling_level",
            "entropy": "entropy_coef",
        },
    ),
    "OffPolicy": (
        "GRPOConfig",
        {
            "weight": "vllm_importance_sampling_mode",
            "level": "vllm_importance_sampling_mode",
            "low": "vllm_importance_sampling_clip_min",
            "high": "vllm_importance_sampling_clip_max",
            "threshold": "off_policy_mask_threshold",
        },
    ),
    "Averaging": (
        "GRPOConfig",
        {"over": "loss_type", "group_size": "num_generations", "length": "max_completion_length"},
    ),
    "topk_distillation": ("ServerDistillationConfig", {"beta": "beta", "tail": "loss_add_tail"}),
    "cosine_distillation": ("", {}),
    "cross_entropy": ("SFTConfig", {"label_smoothing": "label_smoothing_factor"}),
    "linear_cross_entropy": ("SFTConfig", {"label_smoothing": "label_smoothing_factor"}),
    "linear_divergence": ("GKDConfig", {"beta": "beta", "temperature": "temperature"}),
    "kl_div": ("GKDConfig", {"reverse": "beta", "temperature": "temperature"}),
    "jsd": ("GKDConfig", {"beta": "beta", "temperature": "temperature"}),
    "total_variation": ("", {}),
}


def options(name: str) -> dict[str, Any]:
    """Option → default of a loss; arguments that must be given are none."""
    loss = getattr(losses, name) if name in losses.__all__ else getattr(liger_core, name).reference
    parameters = inspect.signature(loss).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in ("mask", *COMPUTED)}


def table() -> str:
    rows = []
    for name, (config, named) in TRL.items():
        own = ", ".join(f"`{option}={_default(value)}`" for option, value in options(name).items())
        theirs = "; ".join(f"`{option}`: `{theirs.replace(', ', '`, `')}`" for option, theirs in named.items())
        rows.append((f"`{name}`", own or "none", f"`{config}`{': ' if theirs else ''}{theirs}" if config else "–"))
    return markdown.table(("loss", "options, with their defaults", "names in TRL 1.16"), rows)


def filled(text: str) -> str:
    return docstrings.filled(text, options=table())


def _default(value: Any) -> str:
    """A default as it is written: of an object, what differs from its own defaults."""
    if is_dataclass(value):
        changed = (f.name for f in fields(value) if getattr(value, f.name) != f.default)
        return f"{type(value).__name__}({', '.join(f'{n}={_default(getattr(value, n))}' for n in changed)})"
    return repr(value).replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
