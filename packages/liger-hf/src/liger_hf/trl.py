# SPDX-License-Identifier: Apache-2.0
"""Liger's head in TRL's trainers:

SFT (`chunked_nll`), DPO, KTO and GRPO compute their log-probabilities by `linear_log_prob`.
"""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from liger_core import OptionError, Unsupported, linear_log_prob
from liger_hf.private_transformers import TRL_HEAD

# Where TRL's head looks its function up, and what it passes to it.
PLACE, NAME = "trl.trainer.utils", TRL_HEAD
PARAMETERS = [
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
]
PerToken = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class TRLHead:
    """The function that `use_in_trl` put into TRL; `undo()`, or the end of a `with` block, restores TRL's own."""

    def __init__(self, module: Any, original: Any) -> None:
        self._module, self._original, self._function = module, original, _Function(original)
        setattr(module, NAME, self._function)

    def undo(self) -> None:
        """Restore TRL's own function; a second call does nothing."""
        if getattr(self._module, NAME) is self._function:
            setattr(self._module, NAME, self._original)

    def __enter__(self) -> TRLHead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def use_in_trl() -> TRLHead:
    """Make TRL's fused head compute log-probabilities and entropies by `linear_log_prob`, in this process.

        with liger_hf.use_in_trl():
            DPOTrainer(model, args=DPOConfig(...), train_dataset=dataset).train()

    The losses stay TRL's own: masking, FSDP's gathering of the head, temperatures, softcaps and scales of models, and
    the metrics are unchanged. A head that DeepSpeed ZeRO-3 has partitioned is left to TRL. `undo` of a second call
    restores the function of the first call.

    Raises Unsupported if TRL is missing, or if its version's head calls another function (1.16 is tested).
    """
    try:
        from trl.trainer import utils
    except ImportError as error:
        raise Unsupported(
            f"use_in_trl needs the package trl, which cannot be imported: {error}; pip install trl"
        ) from error
    original = getattr(utils, NAME, None)
    known = original if not isinstance(original, _Function) else original.original
    forward = getattr(known, "forward", None)
    if forward is None or list(inspect.signature(forward).parameters)[1:] != PARAMETERS:
        import trl

        raise Unsupported(
            f"use_in_trl knows the head of TRL 1.16, got {trl.__version__}, in which {PLACE}.{NAME} is missing or "
            "takes other arguments"
        )
    return TRLHead(utils, original)


class _Function:
    """A replacement for TRL's autograd function, with the same `apply`."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> PerToken:  # fmt: skip
        # Not the names here, but the arguments that TRL's function is called with.
        if hasattr(weight, "ds_id"):
            given = (
                hidden,
                weight,
                bias,
                targets,
                temperature,
                chunk_size,
                final_logit_softcapping,
                logit_scale,
                outputs,
            )
            return self.original.apply(*given)
        weight, wide = _float_weight(weight), None
        if not torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != weight.dtype:
            if hidden.dtype != torch.float32:
                raise OptionError(
                    f"use_in_trl: hidden states and head must have one dtype, got {hidden.dtype} and {weight.dtype}; "
                    "cast one"
                )
            # cast_lm_head_to_fp32: what was float32 only by a cast loses nothing, and the logits are not rounded.
            hidden, wide = hidden.to(weight.dtype), torch.float32
        every = not {"log_probs", "entropy"}.issuperset(outputs)
        found = linear_log_prob(
            hidden, weight, targets, bias=bias if bias is None else bias.to(weight.dtype), temperature=temperature,
            softcap=final_logit_softcapping, logit_scale=logit_scale, logits_dtype=wide,
            return_entropy="entropy" in outputs and not every, return_statistics=every,
        )  # fmt: skip
        if not every:
            return (*found, None, None, None) if isinstance(found, tuple) else (found, None, None, None, None)
        log_prob, statistics = found
        asked = {
            "entropy": statistics.entropy,
            "log_sum_sq_probs": statistics.collision.detach().log(),
            "mean_logits": statistics.mean_logit.detach(),
            "is_top1": statistics.prediction == targets,
        }
        return (log_prob, *(value if name in outputs else None for name, value in asked.items()))


def _float_weight(weight: Tensor) -> Tensor:
    """Return the weight in a floating dtype: a quantized weight is dequantized, and has no gradient."""
    if not weight.is_floating_point():
        raise OptionError(
            f"use_in_trl: the head's weight must have a floating dtype, got {weight.dtype}; leave lm_head out of "
            "quantization "
            "(llm_int8_skip_modules of bitsandbytes)"
        )
    # Every tensor has dequantize; only a subclass of torchao overrides it.
    return weight.dequantize() if type(weight).dequantize is not Tensor.dequantize else weight
