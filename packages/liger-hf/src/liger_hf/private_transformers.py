# SPDX-License-Identifier: Apache-2.0
"""The private names of Transformers, accelerate, PEFT and TRL that the packages use, each with a fallback.

Without a name, the feature that needs it is off, or raises an error when it is used; models still train.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn

from liger_core.private_names import PrivateNames, replacing

TRANSFORMERS = PrivateNames()


def _uncalled(name: str) -> Callable[..., Any]:
    """Return a function of this name that no model calls, since Transformers does not have it."""

    def function(*args: Any, **options: Any) -> Any:
        raise NotImplementedError

    function.__name__ = name
    return function


create_causal_mask = TRANSFORMERS.look_up(
    "transformers.masking_utils:create_causal_mask",
    "Compiled models call attention with is_causal=True instead of a mask.",
    "They make a mask.",
    _uncalled("create_causal_mask"),
)
is_cuda_stream_capturing = TRANSFORMERS.look_up(
    "transformers.utils.import_utils:is_cuda_stream_capturing",
    "Models that are captured in a CUDA graph call attention with is_causal=True instead of a mask.",
    "torch is asked.",
    lambda: torch.cuda.is_available() and torch.cuda.is_current_stream_capturing(),
)
ForCausalLMLoss = TRANSFORMERS.look_up(
    "transformers.loss.loss_utils:ForCausalLMLoss",
    "Recognizes the loss of a model, which is computed without the logits.",
    "The LM head and loss are left to Transformers.",
    _uncalled("ForCausalLMLoss"),
)
ForMaskedLMLoss = TRANSFORMERS.look_up(
    "transformers.loss.loss_utils:ForMaskedLMLoss",
    "Recognizes the loss of a model, which is computed without the logits.",
    "The LM head and loss are left to Transformers.",
    _uncalled("ForMaskedLMLoss"),
)
GradientCheckpointingLayer: type[nn.Module] = TRANSFORMERS.look_up(
    "transformers.modeling_layers:GradientCheckpointingLayer",
    "Finds the layers that can be checkpointed, and the forward that Transformers wraps to checkpoint it.",
    "`liger train` finds no layer to checkpoint; forwards are taken to be unwrapped.",
    type("GradientCheckpointingLayer", (nn.Module,), {}),
)
experts_functions = TRANSFORMERS.look_up(
    "transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS",
    "Finds the function that runs the experts of a layer.",
    "The forward of the layer is taken for it.",
    {},
)
forget_liger_kernel = TRANSFORMERS.look_up(
    "transformers.utils.import_utils:is_liger_kernel_available.cache_clear",
    "`liger_hf.compat` makes Transformers look for the package liger_kernel again.",
    "Transformers is taken to look for it each time.",
    lambda: None,
)
# The code of the functions by which Transformers checkpoints the forward of layers. Since 5.23 it wraps the forward of
# every class of layers; 5.17 does that in __call__.
_wraps: Any = getattr(GradientCheckpointingLayer.__init_subclass__, "__func__", None)
CHECKPOINTING = frozenset(c for c in (_wraps.__code__.co_consts if _wraps else ()) if isinstance(c, CodeType))
_ATTENTION = TRANSFORMERS.word(
    "transformers.configuration_utils:_attn_implementation",
    "Finds the attention of a model.",
    "The model makes a mask as without Liger.",
)
_EXPERTS = TRANSFORMERS.word(
    "transformers.configuration_utils:_experts_implementation",
    "Finds the implementation that runs the experts of a layer.",
    "The op experts is not used.",
)
EXPERTS_CHOSEN = TRANSFORMERS.word(
    "transformers.configuration_utils:_experts_implementation_internal",
    "Checks of experts run the loop of Transformers, which supports float64.",
    "These checks fail, and the experts are left to Transformers.",
)
LOSS = TRANSFORMERS.word(
    "transformers.modeling_utils:_loss_function",
    "Puts a loss that computes no logits into a model.",
    "The check of the head fails, and the head is left to Transformers.",
)
USES_KERNELS = TRANSFORMERS.word(
    "transformers.modeling_utils:_use_kernels", "Notes that a model was loaded with use_kernels=True.", "No note."
)
GATE = TRANSFORMERS.word(
    "transformers.integrations.moe:_apply_gate",
    "Replaces the gate of experts between two grouped matmuls.",
    "It is left to Transformers.",
)
CHECKPOINT = TRANSFORMERS.word(
    "transformers.modeling_layers:_gradient_checkpointing_func",
    "`liger train` chooses layer by layer what is kept for the backward pass.",
    "Setting it has no effect: every checkpointed layer keeps its input.",
)
TP_PLAN = TRANSFORMERS.word(
    "transformers.modeling_utils:_tp_plan",
    "`liger plan` shards a model as its tensor-parallel plan says.",
    "An error with --tp.",
)
_FROM_CONFIG = TRANSFORMERS.word(
    "transformers.modeling_utils:_from_config",
    "`inspect` makes a model without weights.",
    "Models are made by their constructor.",
)
_MAPPING = TRANSFORMERS.word(
    "transformers.models.auto.auto_factory:_model_mapping",
    "`inspect` finds the class of a model.",
    "An error for configs that name none.",
)
LIGER_KERNEL = TRANSFORMERS.word(
    "transformers.integrations.liger:_apply_liger_kernel_to_instance",
    "`liger_hf.compat` answers the call of a Trainer with use_liger_kernel=True.",
    "An error in the Trainer.",
)


def attention_implementation(module: nn.Module | None) -> str | None:
    """Return the name of the attention in the config of a module."""
    return getattr(getattr(module, "config", None), _ATTENTION, None)


def experts_implementation(module: nn.Module | None) -> str | None:
    """Return the name of the implementation of experts in the config of a module."""
    return getattr(getattr(module, "config", None), _EXPERTS, None)


def without_weights(kind: Any, config: Any, **options: Any) -> Any:
    """Make a model of this class from a config."""
    return getattr(kind, _FROM_CONFIG, kind)(config, **options)


def makes(auto: Any, config: Any) -> bool:
    """Return whether an Auto class makes models with such a config."""
    return type(config) in (getattr(auto, _MAPPING, None) or ())


_LOAD = TRANSFORMERS.word(
    "transformers.modeling_utils:_load_pretrained_model",
    "`liger train` loads each rank's shards alone, and says which weights of a checkpoint its model leaves out.",
    "Each rank loads the whole model, and nothing is said.",
)
_RENAME = TRANSFORMERS.word(
    "transformers.core_model_loading:rename_source_key",
    "`liger train` says which weights of a checkpoint its model leaves out.",
    "It does not.",
)
INITIALIZE = TRANSFORMERS.word(
    "transformers.modeling_utils:_init_weights",
    "`liger train` initializes weights whole, one module at a time, and keeps each rank's shards of them.",
    "Each rank initializes its own shards; ranks then draw the same values.",
)
INITIALIZED = TRANSFORMERS.word(
    "transformers.modeling_utils:_is_hf_initialized",
    "`liger train` leaves weights that were loaded.",
    "It initializes them again.",
)


@contextmanager
def recording_checkpoints(files: list[str], names: dict[str, str]) -> Iterator[None]:
    """Record the files that Transformers loads, and each tensor's name in the checkpoint → its name in the model."""
    from transformers import core_model_loading

    if (rename := getattr(core_model_loading, _RENAME, None)) is None:
        yield
        return

    def recorded_rename(name: str, *rest: Any, **options: Any) -> Any:
        renamed = rename(name, *rest, **options)
        names[name] = renamed[0]
        return renamed

    with (
        before_loading(lambda model, checkpoint_files: files.extend(checkpoint_files or ())),
        replacing(core_model_loading, _RENAME, recorded_rename),
    ):
        yield


@contextmanager
def before_loading(prepare: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call prepare(model, files) before Transformers loads the weights of a model from these files, if any."""
    from transformers import PreTrainedModel

    load: Any = getattr(PreTrainedModel, _LOAD, None)

    def prepared(model: Any, state_dict: Any, checkpoint_files: Any, *rest: Any, **options: Any) -> Any:
        prepare(model, checkpoint_files)
        return load(model, state_dict, checkpoint_files, *rest, **options)

    with replacing(PreTrainedModel, _LOAD, staticmethod(prepared)):
        yield


_PACKED = TRANSFORMERS.word(
    "transformers.masking_utils:find_packed_sequence_indices",
    "Without `--packing`, `liger train` and `liger plan` put one text into a row: Transformers need not look for more.",
    "It looks, for which the host waits in each step, or makes masks.",
)
_TRACING = TRANSFORMERS.word(
    "transformers.masking_utils:is_tracing",
    "While a graph is captured, Transformers adds no mask that attention does not need.",
    "It adds masks.",
)


def without_packing() -> AbstractContextManager[Any]:
    """Make Transformers not look for several texts in a row."""
    from transformers import masking_utils

    return replacing(masking_utils, _PACKED, lambda position_ids: None)


def as_outside_a_capture() -> AbstractContextManager[Any]:
    """Make Transformers choose masks as if no graph were captured."""
    from transformers import masking_utils

    return replacing(masking_utils, _TRACING, lambda tensor=None: False)


TP_FORWARD = TRANSFORMERS.word(
    "transformers.distributed.tensor_parallel:tp_forward",
    "Recognizes a head that is sharded over its classes, whose logits are not gathered.",
    "They are.",
)
TP_ORIGINAL = TRANSFORMERS.word(
    "transformers.distributed.tensor_parallel:original_forward",
    "Finds the forward of such a head in the closure of its wrapper.",
    "The head is left to Transformers.",
)
PARTIAL_GRADIENTS = TRANSFORMERS.word(
    "transformers.distributed.tensor_parallel:ReplicatedWithGradAllReduce",
    "Recognizes norms over the heads of a rank, whose accumulated gradients Transformers would add up several times.",
    "It does.",
)
ALL_REDUCE_GRAD = TRANSFORMERS.word(
    "transformers.distributed.tensor_parallel:_all_reduce_grad",
    "The function that adds these gradients up, in the closure of a wrapper; 5.17 has none.",
    "The hook on the module itself is looked at.",
)

TRAINER_GPUS = TRANSFORMERS.word(
    "transformers.training_args:_n_gpu",
    "A measured training run uses one GPU.",
    "The Trainer splits the batch over all GPUs of the process.",
)
TRAINER_DEVICE = TRANSFORMERS.word(
    "transformers.training_args:_setup_devices",
    "A checkpoint that was trained on the CPU can be resumed.",
    "An error when it is resumed.",
)


OFFLOADED = TRANSFORMERS.word(
    "accelerate.hooks:_hf_hook",
    "Recognizes modules whose weights accelerate offloads.",
    "They count as replaced on the instance, and are left.",
)
OFFLOADED_FORWARD = TRANSFORMERS.word(
    "accelerate.hooks:_old_forward",
    "Replaces the forward inside the hooks of offloading.",
    "The module counts as replaced, and is left.",
)
AUTOCAST_FORWARD = TRANSFORMERS.word(
    "accelerate.accelerator:_original_forward",
    "Replaces the forward inside the wrapper of mixed precision.",
    "The model counts as replaced, and its head is left.",
)
PREPARE_TP = TRANSFORMERS.word(
    "accelerate.accelerator:_prepare_tp",
    "FSDP2 over tensor parallelism: accelerate 1.15 converts weights by a class that Transformers no longer has.",
    "accelerate is taken to have mended it.",
)
_reset_state = TRANSFORMERS.look_up_later(
    "accelerate.state:AcceleratorState._reset_state",
    "`liger train` shards over processes on the CPU.",
    "The state stays, which has an effect only in a second run of the process.",
    lambda reset_partial_state: None,
)
_shared_state = TRANSFORMERS.look_up_later(
    "accelerate.state:PartialState._shared_state",
    "`liger train` shards over processes on the CPU.",
    "accelerate decides, which shards on GPUs alone.",
    {},
)


def shard_on_cpu(kind: Any) -> None:
    """Set accelerate's state up for this kind of distributed training on the CPU."""
    from accelerate.state import PartialState

    _reset_state()(reset_partial_state=True)
    PartialState(cpu=True)
    _shared_state()["distributed_type"] = kind


# -- PEFT and TRL

ACTIVATE = TRANSFORMERS.word(
    "peft.tuners.lora.layer:_activate_lora",
    "Hands the adapters of experts to the op.",
    "They are merged into the weights in each call, as by PEFT.",
)
ADAPTERS_DISABLED = TRANSFORMERS.word(
    "peft.tuners.tuners_utils:_disable_adapters",
    "Checks of adapters run with the adapter on.",
    "The check has the state of the checked layer.",
)
TRL_HEAD = TRANSFORMERS.word(
    "trl.trainer.utils:_ChunkedLogProbFunction",
    "`use_in_trl` replaces the head of TRL's trainers.",
    "`use_in_trl` raises Unsupported.",
)
TRL_DIVERGENCE = TRANSFORMERS.word(
    "trl.trainer.distillation_trainer:_chunked_divergence_loss",
    "`use_in_trl` replaces the loss of TRL's DistillationTrainer.",
    "`use_in_trl` raises Unsupported.",
)
