# SPDX-License-Identifier: Apache-2.0
"""Compute the log-probabilities and divergences of TRL's trainers by `linear_log_prob` and `linear_divergence`."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import OptionError, Unsupported, linear_divergence, linear_log_prob
from liger_core.private_names import replacing
from liger_hf.private_transformers import TRL_DIVERGENCE, TRL_HEAD

# The parameters of the functions that are replaced: those of TRL's head, of the loss of DistillationTrainer (the last
# seven as options of our ops), and of the loss of GKDTrainer.
PARAMETERS = [
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
]  # fmt: skip
DIVERGENCE_OPTIONS = {
    "student_lm_head_bias": "bias", "teacher_lm_head_bias": "teacher_bias", "student_logit_scale": "logit_scale",
    "teacher_logit_scale": "teacher_logit_scale", "student_final_logit_softcapping": "softcap",
    "teacher_final_logit_softcapping": "teacher_softcap", "temperature": "temperature",
}  # fmt: skip
DIVERGENCE_PARAMETERS = [
    "student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight",
    "completion_mask", "beta", "num_items_in_batch", *DIVERGENCE_OPTIONS,
]  # fmt: skip
GKD_PARAMETERS = ["model", "inputs", "return_outputs", "num_items_in_batch"]
# Bytes that the head may hold on a GPU. With Gemma 3 1B, the gradients at the end of the backward pass then take more;
# recomputing the logits that this drops takes 1 % of a step.
BUDGET = 1 << 30
# The hidden states of a model, and the weight and bias of its head.
Side = tuple[Tensor, Tensor, Tensor | None]
PerToken = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class TRLHead(AbstractContextManager["TRLHead"]):
    """The functions that `use_in_trl` put into TRL; `undo()`, or the end of a `with` block, restores TRL's own."""

    def __init__(self, *replacements: tuple[Any, str, Any]) -> None:
        self._replacements = [(owner, name, vars(owner)[name], function) for owner, name, function in replacements]
        for owner, name, function in replacements:
            setattr(owner, name, function)

    def undo(self) -> None:
        """Restore TRL's own functions; a second call does nothing."""
        for owner, name, original, function in self._replacements:
            if vars(owner)[name] is function:
                setattr(owner, name, original)

    def __exit__(self, *_: object) -> None:
        self.undo()


def use_in_trl() -> TRLHead:
    """Make TRL compute log-probabilities, entropies and divergences by Liger's ops, in this process.

        with liger_hf.use_in_trl():
            DPOTrainer(model, args=DPOConfig(...), train_dataset=dataset).train()

    SFT, DPO, KTO and GRPO use `linear_log_prob` in place of TRL's fused head, with a budget of 1 GiB on a GPU.
    DistillationTrainer and GKDTrainer use `linear_divergence` on the hidden states of student and teacher: neither
    model's logits are computed. The losses stay TRL's own: masking, FSDP's gathering of the head, temperatures,
    softcaps and scales of models, and the metrics are unchanged.

    TRL's own functions run for a head that DeepSpeed ZeRO-3 has partitioned. In GKDTrainer, they also run if a head is
    not an nn.Linear in a floating dtype, and for an evaluation that returns logits. GOLD and the trainers with a
    teacher on a server are not changed. `undo` of a second call restores the functions of the first call.

    Raises Unsupported if TRL is missing, or if its version has other functions (1.16 is tested).
    """
    try:
        with warnings.catch_warnings():
            # The import warns that experimental trainers may change.
            warnings.simplefilter("ignore")
            from trl.experimental.gkd import GKDTrainer
        from trl.trainer import distillation_trainer, utils
    except ImportError as error:
        raise Unsupported(
            f"use_in_trl needs the package trl, which cannot be imported: {error}; pip install trl"
        ) from error
    head = _checked(utils, TRL_HEAD, ["ctx", *PARAMETERS])
    divergence = _checked(distillation_trainer, TRL_DIVERGENCE, DIVERGENCE_PARAMETERS)
    gkd = _checked(GKDTrainer, "compute_loss", ["self", *GKD_PARAMETERS])
    return TRLHead(
        (utils, TRL_HEAD, _Function(head)),
        (distillation_trainer, TRL_DIVERGENCE, _divergence_loss(divergence)),
        (GKDTrainer, "compute_loss", _gkd_loss(gkd, utils)),
    )


def _checked(owner: Any, name: str, parameters: list[str]) -> Any:
    """Return TRL's function, or raise Unsupported if it is missing or takes other arguments."""
    original = getattr(owner, name, None)
    function = getattr(original, "forward", original)
    if function is None or list(inspect.signature(function).parameters) != parameters:
        import trl

        raise Unsupported(
            f"use_in_trl knows TRL 1.16, got {trl.__version__}, in which {owner.__name__}.{name} is missing or takes "
            "other arguments"
        )
    return original


class _Function:
    """A replacement for TRL's autograd function, with the same `apply`."""

    def __init__(self, original: Any) -> None:
        self.original, self.forward = original, original.forward

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
            budget=None if hidden.is_cpu else BUDGET,
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


def _divergence_loss(original: Any) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return DistillationTrainer's loss, summed entropy of the student and number of tokens from hidden states."""

    @functools.wraps(original)
    def loss(
        hidden: Tensor, teacher_hidden: Tensor, weight: Tensor, teacher_weight: Tensor, completion_mask: Tensor,
        beta: float, num_items_in_batch: Tensor | int | None = None, **trl_options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if hasattr(weight, "ds_id") or hasattr(teacher_weight, "ds_id"):
            return original(
                hidden, teacher_hidden, weight, teacher_weight, completion_mask, beta, num_items_in_batch, **trl_options
            )
        options = {DIVERGENCE_OPTIONS[name]: value for name, value in trl_options.items()}
        student = _side(hidden, weight, options.pop("bias", None))
        teacher = _side(teacher_hidden, teacher_weight, options.pop("teacher_bias", None))
        count, target = (completion_mask != 0).sum(), torch.where(completion_mask != 0, 0, -100)
        total = _divergence(student, teacher, target, beta, **options)
        ours = {name: value for name, value in options.items() if not name.startswith("teacher")}
        with torch.no_grad():
            _, entropy = linear_log_prob(*student[:2], target, bias=student[2], return_entropy=True, **ours)
        return _mean(total, count, num_items_in_batch), entropy.sum(), count

    return loss


def _gkd_loss(original: Any, utils: Any) -> Callable[..., Any]:
    """Return GKDTrainer's loss from what TRL's fused head gets of both models, within their own forward passes."""

    @functools.wraps(original)
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        heads = (self.accelerator.unwrap_model(model).get_output_embeddings(), teacher.get_output_embeddings())
        if return_outputs or not all(map(_is_plain, heads)):
            return original(self, model, inputs, return_outputs, num_items_in_batch)
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
        counted = batch["labels"][:, 1:] != -100
        self.teacher_model.eval()
        with replacing(utils, TRL_HEAD, _Heads(self.beta, counted)), self.accelerator.autocast():
            with torch.no_grad(), _fused_head(teacher, utils):
                self.teacher_model(**batch, fused_lm_head=True)
            total = model(**batch, fused_lm_head=True).log_probs.sum()
        return _mean(total, counted.sum(), num_items_in_batch)

    return compute_loss


class _Heads:
    """A replacement for TRL's autograd function in a step of GKD: the teacher calls it first, then the student."""

    def __init__(self, beta: float, counted: Tensor) -> None:
        self.beta, self.counted = beta, counted.reshape(-1)
        self.teacher: tuple[Side, dict[str, Any]] | None = None

    def apply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *trl_options: Any) -> PerToken:
        # These are targets, temperature and chunk size, softcap and logit scale, and the names of outputs.
        softcap, logit_scale = trl_options[3:5]
        side = _side(hidden, weight, bias)
        if self.teacher is None:
            self.teacher = side, {"teacher_softcap": softcap, "teacher_logit_scale": logit_scale}
            return hidden.new_zeros(hidden.shape[0]), None, None, None, None
        teacher, options = self.teacher
        # On a GPU, TRL passes only the rows that count.
        counted = self.counted.to(hidden.device)
        counted = counted if counted.shape[0] == hidden.shape[0] else counted.new_ones(hidden.shape[0])
        total = _divergence(
            side, teacher, torch.where(counted, 0, -100), self.beta, softcap=softcap, logit_scale=logit_scale,
            **options,
        )  # fmt: skip
        # The forward pass returns one number per token, and FSDP needs the loss to depend on what it returns.
        return torch.where(counted, total / counted.sum().clamp(min=1), 0.0), None, None, None, None


@contextmanager
def _fused_head(model: Any, utils: Any) -> Iterator[None]:
    """Give a model TRL's fused head within this context."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = vars(model).get("forward")
    utils.add_fused_lm_head(model)
    try:
        yield
    finally:
        if forward is None:
            del model.forward
        else:
            model.forward = forward


def _is_plain(head: Any) -> bool:
    """Return whether a head is one matmul with a weight that this process can read."""
    return isinstance(head, nn.Linear) and head.weight.is_floating_point() and not hasattr(head.weight, "ds_id")


def _side(hidden: Tensor, weight: Any, bias: Any) -> Side:
    """Return the hidden states of a model and its head in their dtype, gathered from FSDP2's shards."""
    weight, bias = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in (weight, bias))
    return hidden, _float_weight(weight).to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)


def _divergence(student: Side, teacher: Side, target: Tensor, beta: float, **options: Any) -> Tensor:
    """Return the sum of TRL's generalized JSD over the rows with a target; 0 and 1 name the forward and reverse KL."""
    options["kind"] = "forward_kl" if beta == 0 else "reverse_kl" if beta == 1 else "jsd"
    theirs, weight, bias = teacher
    return linear_divergence(
        *student[:2], theirs, weight.detach(), bias=student[2], teacher_bias=None if bias is None else bias.detach(),
        beta=beta, target=target, reduction="sum", **options,
    )  # fmt: skip


def _mean(total: Tensor, count: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Divide by the tokens of the whole batch if Trainer counted them, else by those of this call."""
    items = torch.as_tensor(count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    return total / items.to(total.device)


def _float_weight(weight: Tensor) -> Tensor:
    """Return the weight in a floating dtype: a quantized weight is dequantized, and has no gradient."""
    if not weight.is_floating_point():
        raise OptionError(
            f"use_in_trl: the head's weight must have a floating dtype, got {weight.dtype}; leave lm_head out of "
            "quantization (llm_int8_skip_modules of bitsandbytes)"
        )
    # Every tensor has this method, but only a subclass of torchao overrides it.
    return weight.dequantize() if type(weight).dequantize is not Tensor.dequantize else weight
