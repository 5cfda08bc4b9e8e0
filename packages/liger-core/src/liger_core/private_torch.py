# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that the packages use, with a safe fallback: slower, or an error in one feature."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as hooks_of_modules

from liger_core.private_names import PrivateNames

F = TypeVar("F", bound=Callable[..., Any])

TORCH = PrivateNames()

# -- modes and transforms

dispatch_stack_length = TORCH.look_up(
    "torch._C:_len_torch_dispatch_stack",
    "Eager calls skip the dispatcher unless a dispatch mode watches.",
    "Every call goes through the dispatcher, main_grad is refused and values of targets are not checked.",
    lambda: 1,
)
interpreter_stack = TORCH.look_up(
    "torch._C:_functorch.peek_interpreter_stack",
    "Recognizes torch.func transforms, which need plain PyTorch.",
    "Every argument is asked for a transform; nothing is overwritten, and the inductor backend runs references.",
    lambda: (),
)
is_wrapped = TORCH.look_up(
    "torch._C:_functorch.is_functorch_wrapped_tensor",
    "Recognizes tensors of torch.func transforms.",
    "All tensors count as wrapped while a transform is open.",
    lambda tensor: bool(interpreter_stack()),
)
is_legacy_batched = TORCH.look_up(
    "torch._C:_functorch.is_legacy_batchedtensor",
    "Refuses batches of upstream gradients (is_grads_batched=True) with a message.",
    "The error is torch's own: such tensors have no memory.",
    lambda tensor: False,
)
FORWARD_LEVEL = TORCH.word(
    "torch.autograd.forward_ad:_current_level",
    "Shows whether forward-mode AD is on without asking every argument.",
    "Every argument is asked; the inductor backend runs references.",
)
forward_mode_enabled = TORCH.look_up(
    "torch._C:_is_fwd_grad_enabled",
    "Recognizes the forward of a custom autograd function, to which lazy logits cannot give a gradient.",
    "Such a function is not recognized.",
    lambda: True,
)
_EXPORTING = TORCH.word(
    "torch.compiler:_is_exporting_flag",
    "Recognizes torch.export. The public is_exporting() of torch 2.11 is true in every compiled region.",
    "torch.compiler.is_exporting() is asked instead.",
)
_CONSTANT = TORCH.word(
    "torch._dynamo.decorators:_dynamo_marked_constant",
    "Marks functions whose result Dynamo takes as a constant. The public decorator imports the whole compiler.",
    "Dynamo traces these functions, and may break the graph at them.",
)


def constant_when_traced(function: F) -> F:
    """Mark a function's result as constant, like assume_constant_result, but without importing the compiler."""
    setattr(function, _CONSTANT, True)
    return function


def is_exporting() -> bool:
    """Whether torch.export traces a program."""
    exporting: bool = getattr(torch.compiler, _EXPORTING)
    return exporting


if not hasattr(torch.compiler, _EXPORTING):
    is_exporting = torch.compiler.is_exporting


@contextmanager
def _autocast_off() -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for device in {"cpu", *([] if accelerator is None else [accelerator.type])}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


autocast_is_on = TORCH.look_up(
    "torch._C:_is_any_autocast_enabled",
    "Kernels run without autocast; shows whether there is any to switch off.",
    "Autocast is switched off around every kernel.",
    lambda: True,
)
DisableAutocast = TORCH.look_up(
    "torch._C:_DisableAutocast",
    "Switches autocast off around a kernel.",
    "torch.autocast(enabled=False) for the CPU and the accelerator, which takes longer.",
    _autocast_off,
)

# -- the running backward pass

keeps_graph = TORCH.look_up(
    "torch._C:_autograd._get_current_graph_task_keep_graph",
    "A backward pass that frees its graph may work in saved tensors.",
    "It allocates new memory.",
    lambda: True,
)
graph_task = TORCH.look_up(
    "torch._C:_current_graph_task_id",
    "Shows whether a backward pass runs, which may work in saved tensors if it frees its graph.",
    "It allocates new memory, and `liger plan` predicts that.",
    lambda: -1,
)
saved_tensors_hooks = TORCH.look_up(
    "torch._C:_autograd._top_saved_tensors_default_hooks",
    "Recognizes activation checkpointing, which recomputes logits.",
    "Checkpointing is assumed.",
    lambda ignore_tracing: (),
)

# -- who holds a tensor

_HELD = "Shows whether anything else holds a tensor or its memory, so that it may be overwritten."
storage_uses, _tensor_uses = (
    TORCH.look_up(path, _HELD, "Nothing is overwritten.", None)
    for path in ("torch._C:_storage_Use_Count", "torch:Tensor._use_count")
)
_STORAGE = TORCH.word(
    "torch.storage:_cdata",
    "Identifies the memory of a tensor, also of a fake one, which has no address.",
    "The identity of the Python object, which a storage keeps while it lives.",
)
COUNTS_HOLDERS = storage_uses is not None and _tensor_uses is not None and hasattr(torch.UntypedStorage, _STORAGE)
DisableTorchFunction = TORCH.look_up(
    "torch._C:DisableTorchFunction",
    "Makes a tensor whose holders are known, whatever modes are on.",
    "Under a mode of torch functions, nothing is overwritten.",
    nullcontext,
)
without_modes = TORCH.look_up(
    "torch.utils._python_dispatch:_disable_current_modes",
    "Makes a tensor whose holders are known, and traces the compiled layers of a plan, whatever modes are on.",
    "Under a dispatch mode, nothing is overwritten, and layers are planned in eager mode.",
    nullcontext,
)


def holders(tensors: tuple[Any, ...], index: int) -> tuple[int, ...]:
    """Count the holders of a tensor's Python object, C++ tensor and memory; for a view, also the first two of its base.

    The tensor is neither bound to a name here nor passed to Python code: a debugger holds variables, and the frame
    evaluator that a failed torch.compile leaves behind holds arguments.
    """
    counts = (
        sys.getrefcount(tensors[index]),
        tensors[index]._use_count(),
        storage_uses(tensors[index].untyped_storage()._cdata),
    )
    if tensors[index]._base is None:
        return counts
    return *counts, sys.getrefcount(tensors[index]._base), tensors[index]._base._use_count()


def storage_id(storage: Any) -> int:
    """Return a number that identifies a storage while it lives."""
    address: int | None = getattr(storage, _STORAGE, None)
    return id(storage) if address is None else address


# -- hooks of all modules

has_global_hook = TORCH.look_up(
    "torch.nn.modules.module:_has_any_global_hook",
    "A fused forward passes over child modules only if no hook of all modules would see them.",
    "The dictionaries of hooks are looked at one by one.",
    lambda: any(global_hooks().values()),
)
_BACKWARD_HOOKS = [
    TORCH.word(
        f"torch.nn.modules.module:_global_backward_{name}",
        "Logits are computed at once if a backward hook of all modules sees them.",
        "Any hook of all modules counts as one.",
    )
    for name in ("hooks", "pre_hooks")
]
_GLOBAL_HOOKS = TORCH.word(
    "torch.nn.modules.module:_global_",
    "Checks of `apply` run without the hooks of all modules, whose names start so.",
    "These hooks see the checks.",
)


def global_hooks() -> dict[str, Any]:
    """Return the hooks of all modules, of every kind, by the names of their dictionaries."""
    return {
        name: value
        for name, value in vars(hooks_of_modules).items()
        if name.startswith(_GLOBAL_HOOKS) and isinstance(value, dict)
    }


def has_global_backward_hook() -> bool:
    """Whether a backward hook of all modules is registered."""
    for name in _BACKWARD_HOOKS:
        hooks = getattr(hooks_of_modules, name, None)
        if has_global_hook() if hooks is None else hooks:
            return True
    return False


# -- operators

grouped_mm = TORCH.look_up(
    "torch:_grouped_mm",
    "Multiplies the groups of experts in bfloat16 on a GPU.",
    "The Triton kernel for other dtypes multiplies them.",
    None,
)


def _operators(names: tuple[str, ...], purpose: str) -> frozenset[Any]:
    every = [TORCH.look_up(f"torch:ops.aten.{name}.default", purpose, "They are recomputed.", None) for name in names]
    return frozenset(every) - {None}


MATMULS = _operators(("_scaled_mm", "_grouped_mm"), "Partial checkpointing keeps the outputs of matmuls.")
ATTENTION = _operators(
    (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "Partial checkpointing keeps the outputs of attention.",
)
_PLANNED = "`liger plan` counts the memory of attention on a GPU and of compiled layers."
flash_attention = TORCH.require("torch:ops.aten._scaled_dot_product_flash_attention.default", _PLANNED)
efficient_attention = TORCH.require("torch:ops.aten._scaled_dot_product_efficient_attention.default", _PLANNED)
ATTENTION_BACKWARD = {
    TORCH.require(f"torch:ops.aten._scaled_dot_product_{name}_attention_backward.default", _PLANNED)
    for name in ("flash", "efficient")
}

# -- ranks

collectives = TORCH.look_up(
    "torch:ops._c10d_functional",
    "The ranks of a sharded vocabulary exchange a few numbers per row. The public functions warn of deprecations.",
    "An error in calls with a sharded vocabulary.",
    None,
)
hold_stream = TORCH.look_up(
    "torch.cuda:_sleep",
    "The ranks of a sharded head exchange gradients while a matmul takes every processor of the GPU.",
    "They exchange them afterwards: 2 % of a head on two H200s.",
    id,
)
process_group = TORCH.require(
    "torch.distributed.distributed_c10d:_resolve_process_group", "Finds the ranks of a sharded vocabulary."
)
flatten_mesh = TORCH.require(
    "torch.distributed.device_mesh:DeviceMesh._flatten",
    "`liger verify` shards over data-parallel and context-parallel ranks.",
)
IS_FSDP = TORCH.word(
    "torch.distributed.fsdp._fully_shard._fully_shard:_is_fsdp_managed_module",
    "Logits of an evaluation are computed at once if FSDP frees the weights of the head.",
    "They may be read only before the next forward pass.",
)
FSDP_STATE = TORCH.word(
    "torch.distributed.fsdp._fully_shard._fully_shard:_get_fsdp_state",
    "Recognizes a head that FSDP2 shards by itself.",
    "Hooks of such a head make its logits be computed at once.",
)

# -- devices

current_device = TORCH.look_up(
    "torch._C:_cuda_getDevice",
    "Finds the current GPU for each kernel.",
    "torch.cuda.current_device(), which takes longer.",
    torch.cuda.current_device,
)
raw_stream = TORCH.look_up(
    "torch._C:_cuda_getCurrentRawStream",
    "Finds the current stream for each kernel.",
    "torch.cuda.current_stream(), which takes longer.",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)
end_allocate_to_pool = TORCH.look_up(
    "torch._C:_cuda_endAllocateToPool",
    "Cleans up after a CUDA graph that could not be captured.",
    "The memory of the graph stays reserved.",
    lambda device, pool: None,
)
multiplies_bfloat16, multiplies_float16 = (
    TORCH.look_up(
        f"torch:ops.mkldnn._is_mkldnn_{dtype}_supported",
        "Shows whether PyTorch has a fast matmul in 16 bits for this processor.",
        "It is taken to have one: on an older processor, ops in that dtype take several times as long.",
        lambda: True,
    )
    for dtype in ("bf16", "fp16")
)

# -- fake tensors


class _Nothing(Exception):
    """A stand-in for a class of errors or tensors that torch does not have."""


FakeTensor = TORCH.look_up(
    "torch._subclasses.fake_tensor:FakeTensor",
    "Fake tensors stand for plain ones when a training run is planned.",
    "They do not.",
    _Nothing,
)
FakeTensorMode = TORCH.require(
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "`liger plan` and `liger bench` run models and ops without memory, and `explain` asks a backend.",
)
unset_fake_temporarily = TORCH.look_up(
    "torch._subclasses.fake_tensor:unset_fake_temporarily",
    "Checks of `apply` compute with numbers while a training run is planned.",
    "These checks fail, so `liger plan` predicts the model without Liger.",
    nullcontext,
)
DataDependentOutput, DynamicOutputShape = (
    TORCH.look_up(
        f"torch._subclasses.fake_tensor:{name}Exception",
        "`liger plan` says that a model reads values.",
        "It shows torch's error.",
        _Nothing,
    )
    for name in ("DataDependentOutput", "DynamicOutputShape")
)

active_modes = TORCH.require("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", _PLANNED)

set_allocator_settings = TORCH.look_up(
    "torch._C:_accelerator_setAllocatorSettings",
    "`liger train` lets the segments of the CUDA allocator grow, so that less memory is lost to gaps.",
    "Segments have fixed sizes, as by default in PyTorch.",
    lambda settings: None,
)

# -- the compiler, whose import takes a second

compiler_counters = TORCH.look_up_later(
    "torch._dynamo.utils:counters",
    "`liger train` reports how many compiled graphs came from the cache.",
    "It reports none.",
    Counter({"inductor": Counter[str]()}),
)
compiler_times = TORCH.look_up_later(
    "torch._dynamo.utils:calculate_time_spent",
    "`liger train` reports how long it has compiled.",
    "It reports 0.",
    dict[str, float],
)
CompilerError = TORCH.look_up_later(
    "torch._dynamo.exc:TorchDynamoException",
    "`liger train` continues without torch.compile if that fails.",
    "The error of the compiler ends the run.",
    _Nothing,
)
compile_by_inductor = TORCH.look_up_later(
    "torch._inductor.compile_fx:compile_fx",
    "`liger plan` runs the graphs of compiled layers on fake tensors, before Inductor generates code for them.",
    "Layers are planned in eager mode.",
    None,
)
graph_options = TORCH.look_up_later(
    "torch._functorch.config:patch",
    "`liger plan` keeps its graphs out of the cache of compiled ones.",
    "A plan on the CPU may run compiled code of a training run, which fails.",
    lambda **options: nullcontext(),
)
fusible_operators = TORCH.look_up_later(
    "torch._functorch.partitioners:get_default_op_list",
    "`liger plan` does not count results within fused ops of compiled layers.",
    "It counts them.",
    lambda: SimpleNamespace(fusible_ops=frozenset()),
)
OperatorIssue = TORCH.look_up_later(
    "torch._inductor.exc:OperatorIssue",
    "`--compile` does not let Inductor write out the arguments of custom ops; up to torch 2.12 it always does.",
    "With torch 2.12 and older, compiling layers with LoRA and checkpointing takes minutes.",
    SimpleNamespace(),
)
