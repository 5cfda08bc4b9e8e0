# SPDX-License-Identifier: Apache-2.0
"""Compute the log-probabilities of TRL's SFT (`chunked_nll`), DPO, KTO and GRPO trainers by `linear_log_prob`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from liger_core import OptionError, Unsupported, linear_log_prob
from liger_hf.private_transformers import TRL_HEAD

# The module and the name by which TRL's head finds its function, and the function's parameters.
MODULE, NAME = "trl.trainer.utils", TRL_HEAD
PARAMETERS = [
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
]  # fmt: skip
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

    def __exit__(self, *_: object) -> None:
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
            f"use_in_trl knows the head of TRL 1.16, got {trl.__version__}, in which {MODULE}.{NAME} is missing or "
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
        # Called with TRL's arguments by position.
        if hasattr(weight, "ds_id"):
            return self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
        weight, wide = _float_weight(weight), None
        if not torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != weight.dtype:
            if hidden.dtype != torch.float32:
                raise OptionError(
                    f"use_in_trl: hidden states and head must have one dtype, got {hidden.dtype} and {weight.dtype}; "
                    "cast one"
                )
            # With cast_lm_head_to_fp32, casting back loses nothing, and the logits are not rounded.
            hidden, wide = hidden.to(weight.dtype), torch.float32
        every = not {"log_probs", "entropy"}.issuperset(outputs)
        result = linear_log_prob(
            hidden, weight, targets, bias=bias if bias is None else bias.to(weight.dtype), temperature=temperature,
            softcap=final_logit_softcapping, logit_scale=logit_scale, logits_dtype=wide,
            return_entropy="entropy" in outputs and not every, return_statistics=every,
        )  # fmt: skip
        if not every:
            return (*result, None, None, None) if isinstance(result, tuple) else (result, None, None, None, None)
        log_prob, statistics = result
        optional = {
            "entropy": statistics.entropy,
            "log_sum_sq_probs": statistics.collision.detach().log(),
            "mean_logits": statistics.mean_logit.detach(),
            "is_top1": statistics.prediction == targets,
        }
        return (log_prob, *(value if name in outputs else None for name, value in optional.items()))


def _float_weight(weight: Tensor) -> Tensor:
    """Return the weight in a floating dtype: a quantized weight is dequantized, and has no gradient."""
    if not weight.is_floating_point():
        raise OptionError(
            f"use_in_trl: the head's weight must have a floating dtype, got {weight.dtype}; leave lm_head out of "
            "quantization (llm_int8_skip_modules of bitsandbytes)"
        )
    # Every tensor has this method, but only a subclass of torchao overrides it.
    return weight.dequantize() if type(weight).dequantize is not Tensor.dequantize else weight
