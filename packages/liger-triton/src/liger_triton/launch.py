# SPDX-License-Identifier: Apache-2.0
"""The parts that all launchers share: the device guard, row views, and the dtypes that the kernels support."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.runtime import driver

from liger_core import Unsupported
from liger_core.autograd import differentiable
from liger_core.kernels import Kernel, Outputs
from liger_core.private_torch import current_device, raw_stream
from liger_triton import interpreter

if knobs.runtime.interpret:
    interpreter.round_to_nearest()
    interpreter.multiply_bfloat16()
    interpreter.round_once()
    interpreter.narrow_floats()
    interpreter.ignore_nan()
    interpreter.compare_to_booleans()
    interpreter.find_builtins_once()

NAMESPACE = "liger_triton"
PLAIN = frozenset({Tensor, Parameter})
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
# Releases of Triton that `Launcher` can call: 3.6 takes the arguments one by one, the others in a tuple.
KNOWN_RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")
# Column tiles, not a program per row: padding to a power of two would idle a third of the lanes at 11008 columns.
TILE, TILE_WARPS = 2048, 8
# Neighboring elements that one thread takes: 16 bytes of bf16.
VECTOR = 8
# Programs of a persistent grid in the interpreter, where each takes milliseconds and there is nothing to fill.
INTERPRETER_PROCESSORS = 2


class TritonKernel(Kernel):
    """A Kernel that launches on the device of its tensors, whichever device is current."""

    def __init__(self, name: str, allocate: Any, launch: Any, recycle: Any = None, scratch: Any = None) -> None:
        super().__init__(NAMESPACE, name, allocate, launch, recycle, scratch)
        self.anchor = next(i for i, a in enumerate(self.schema.arguments) if a.type == "Tensor")

    def execute(self, args: tuple[Any, ...], allocate: Any) -> Outputs:
        device = args[self.anchor].get_device()
        if device >= 0 and device != current_device():
            with torch.cuda.device(device):
                return super().execute(args, allocate)
        return super().execute(args, allocate)


class ComposedKernel(TritonKernel):
    """A kernel that launches others, which allocate its outputs: its launch gets None for each, and returns them.

    reused  the input that a backward may overwrite if it frees its graph; launch gets it as its last output, `scratch`
    """

    def __init__(self, name: str, allocate: Any, launch: Any, reused: str = "", scratch: Any = None) -> None:
        super().__init__(name, allocate, launch, partial(allocate) if reused else None, scratch)
        self.reused = next((i for i, a in enumerate(self.schema.arguments) if a.name == reused), None)

    def execute(self, args: tuple[Any, ...], allocate: Any) -> Outputs:
        outputs: list[Any] = [None] * self.count
        if self.reused is not None and allocate is self.recycle:
            outputs[-1] = args[self.reused]
        # Does nothing for CPU tensors.
        with torch.cuda.device_of(args[self.anchor]):
            results: Any = self.launch(*outputs, *self.grouped(args))
        return results


class Launcher:
    """The launcher of a Triton kernel, `launcher(grid, *args, BLOCK=…, num_warps=…)`, with a cache of compiled kernels.

    Triton's own call takes 10 µs longer to find one (H200 host, 12 arguments: 14.3 instead of 4.8 µs). The key holds
    all that Triton specializes on: dtypes, 16-byte alignment, the values of integers, the constexprs and the device.
    Pass numeric options as float: each value of an int would compile a kernel of its own.
    Pointers are passed as addresses: for a tensor, Triton would ask the driver whether the device can reach it, which
    every op's `check` has made sure of. Releases of Triton other than KNOWN_RELEASES get Triton's own call.
    """

    LIMIT = 4096

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names = kernel.arg_names
        self.compiled: dict[Any, Any] = {}
        self.direct = not knobs.runtime.interpret and triton.__version__.startswith(KNOWN_RELEASES)

    def __call__(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if 0 in grid:
            # Nothing to compute, so nothing to compile.
            return
        # A profiler's hooks need launch metadata that only Triton's own call collects.
        if not self.direct or getattr(knobs.runtime.launch_enter_hook, "calls", True):
            self.call_triton(grid, args, options)
            return
        device = current_device()
        addresses = 0
        key: list[Any] = [device]
        values: list[Any] = []
        for arg in args:
            if type(arg) is int:
                key.append(arg)
            elif arg is None or type(arg) is float:
                key.append(type(arg))
            else:
                key.append(arg.dtype)
                arg = arg.data_ptr()
                addresses |= arg
            values.append(arg)
        if addresses & 15:
            self.call_triton(grid, args, options)
            return
        key.extend(options.values())
        cached = self.compiled.get(tuple(key))
        if cached is None:
            self.keep(tuple(key), self.call_triton(grid, args, options), len(args), options)
            return
        start, function, between, constants, in_a_tuple = cached
        x, y = grid if len(grid) == 2 else (grid[0], 1)
        stream = raw_stream(device)
        if in_a_tuple:
            start(x, y, 1, stream, function, *between, (*values, *constants))
        else:
            start(x, y, 1, stream, function, *between, *values, *constants)

    def after(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launch a kernel that reads the results of the last launch: it starts early and waits for them in `wait`.

        This saves 1.2 µs per launch on an H200 (programmatic dependent launch).
        """
        early = self.direct and overlaps()
        self(grid, *args, EARLY=early, **({"launch_pdl": True} if early else {}), **options)

    def call_triton(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Launch by Triton's own call. Fusion is requested explicitly, because Triton 3.10 changes the default."""
        return self.kernel[grid](*args, **{"enable_fp_fusion": True, **options})

    def keep(self, key: tuple[Any, ...], compiled: Any, count: int, options: dict[str, Any]) -> None:
        """Cache a compiled kernel for calls with `count` arguments, with all that Triton's launcher needs."""
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
            # Scratch memory and a sanitizer's state belong to one launch; Triton's own call provides them.
            self.direct = False
            return
        if len(self.compiled) >= self.LIMIT:
            self.compiled.clear()
        # Between the function and its arguments: launch flags, metadata, no hooks, no scratch memory.
        flags, metadata = (run.launch_cooperative_grid, run.launch_pdl), compiled.packed_metadata
        in_a_tuple = hasattr(run, "kernel_signature")
        between: tuple[Any, ...] = (*flags, None, None, metadata, None, None, None)
        if in_a_tuple:
            between = (*flags, metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
        constants = tuple(options[name] for name in self.names[count:])
        self.compiled[key] = (run.launch, compiled.function, between, constants, in_a_tuple)


def overlaps() -> bool:
    """Whether the current device may start a kernel before the previous one has ended: NVIDIA's Hopper and later."""
    return torch.version.cuda is not None and capability(current_device()) >= (9, 0)


@cache
def capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait until the previous kernel has ended and its results are visible; see `Launcher.after`."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


def supported(*tensors: Tensor | None) -> None:
    """Decline dtypes that the kernels do not compute in, and DTensors."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise Unsupported(f"the Triton kernels take float32, bfloat16 and float16, got {tensor.dtype}")
        if type(tensor) not in PLAIN and hasattr(tensor, "full_tensor"):
            raise Unsupported("the Triton kernels take plain tensors, got a DTensor")


def fuses(block: int) -> bool:
    """Whether a reduction of so many elements may fuse products into its sums.

    In Triton 3.6, every thread that knows a sum may write it to shared memory (triton-lang/triton#7264, #11614). Their
    bits agree only if no thread fuses the product of its single element into the sum with its neighbor's rounded
    product.
    """
    return block > 512


def cdiv(a: int, b: int) -> int:
    """Return ⌈a / b⌉, in a tenth of the time of triton.cdiv."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the next power of two, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def rows_of(x: Tensor) -> Tensor:
    """Return x as (rows, width) with adjacent columns: a view where its strides allow, else a copy."""
    if x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1):
        return x
    if x.dim() == 0:
        return x.view(1, 1)
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def tiles_of(*tensors: Tensor) -> tuple[int, int, int, int]:
    """Return (rows, width, tiles per row, block); dense tensors count as one long row."""
    rows, width = tensors[0].shape
    if all(t.is_contiguous() for t in tensors):
        rows, width = 1, rows * width
    block = min(TILE, power_of_two(max(1, width)))
    return rows, width, cdiv(width, block), block


def dense_like(x: Tensor) -> Tensor:
    """Allocate a result of the shape of x in dense rows, whatever the strides of x (1 µs; new_empty takes 1.8)."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gradients_like(needs: list[bool], *tensors: Tensor | None) -> Outputs:
    """Return new memory like each tensor whose gradient is needed, and None for the others."""
    return tuple(dense_like(t) if need and t is not None else None for need, t in zip(needs, tensors, strict=True))


def first_like(x: Tensor, *rest: object) -> Outputs:
    """Allocate the only result of a launch, which is like its first input; in a backward pass, that is the gradient."""
    return (dense_like(x),)


def gradients_of(launch_backward: Callable[..., None]) -> Callable[..., Outputs]:
    """Return the `allocate` of a backward launch: memory like x for a result grad_x that is needed, else None."""
    parameters = inspect.signature(launch_backward).parameters.values()
    results = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    inputs = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    if unknown := [result for result in results if result.removeprefix("grad_") not in inputs]:
        raise TypeError(
            f"{launch_backward.__module__}: the results of a backward launch must be grad_<one of its arguments> "
            f"({', '.join(inputs)}), got {', '.join(unknown)}; pass allocate_backward for others"
        )
    sources = [inputs.index(result.removeprefix("grad_")) for result in results]

    def allocate(*args: Any) -> Outputs:
        return gradients_like(args[-1], *[args[i] for i in sources])

    return allocate


def differentiable_kernels(
    name: str, allocate: Any, launch: Any, launch_backward: Any, allocate_backward: Any = None, *, recycle: Any = None,
    public: int = 1,
) -> Callable[..., Any]:  # fmt: skip
    """Return the differentiable function of the kernels of two launches; it saves the tensors that backward takes.

    allocate_backward  by default, `gradients_of(launch_backward)`
    recycle, public    see `Kernel` and `differentiable`
    """
    forward = TritonKernel(name, allocate, launch)
    allocate_backward = allocate_backward or gradients_of(launch_backward)
    backward = TritonKernel(f"{name}_backward", allocate_backward, launch_backward, recycle)
    upstream = {f"grad_{result.name}" for result in forward.schema.returns}
    tensors = [argument.name for argument in backward.schema.arguments if argument.type.startswith("Tensor")]
    return differentiable(forward, backward, [tensor for tensor in tensors if tensor not in upstream], public)


def row_shape(width: int, most: int, warps: Callable[[int], int]) -> tuple[int, int, int]:
    """Return (block, rows, warps) of a program: rows of up to `most` columns share one, others get warps(block)."""
    block = power_of_two(width)
    if block <= most:
        return block, max(1, min(64, most // block)), 4
    return block, 1, warps(block)


def strided_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x as rows of adjacent columns, copied if its strides require it, and the stride of the rows."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = rows_of(x)
    return x, x.stride(0)


def contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def registers(most: int | None, like: Tensor) -> dict[str, int]:
    """Return the option that limits a thread's registers, for more warps; only Triton's NVIDIA backend has it."""
    return {"maxnreg": most} if most and like.is_cuda and torch.version.cuda else {}


@cache
def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return 0
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def stages_of(size: int, like: Tensor, most: int = 3) -> int:
    """Return the pipeline stages, up to `most`, that fit in shared memory if each takes `size` bytes of it."""
    # One KiB is left for reductions.
    return max(1, min(most, (shared_memory(like.device) - 1024) // max(1, size)))


@cache
def l2_cache(device: torch.device) -> int:
    """Return the bytes of the cache that all multiprocessors share."""
    if device.type != "cuda":
        return 2**20
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
