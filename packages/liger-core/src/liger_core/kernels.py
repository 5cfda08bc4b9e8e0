# SPDX-License-Identifier: Apache-2.0
"""Kernels as custom ops, for torch.compile and eager Python; and the matmul that they call.

A `Kernel` is a custom op made of `allocate` (its outputs, and so also its fake) and `launch` (fills them). Plain eager
calls skip the dispatcher, which takes longer than a small kernel; torch.compile, dispatch modes and tensor subclasses
get the custom op. `liger_core/autograd.py` makes a differentiable function of two kernels.

A processor without instructions for a 16-bit dtype multiplies in float32, a tile at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from liger_core.errors import GradientError, Unsupported
from liger_core.private_torch import (
    FORWARD_LEVEL,
    DisableAutocast,
    autocast_is_on,
    constant_when_traced,
    dispatch_stack_length,
    graph_task,
    interpreter_stack,
    is_wrapped,
    keeps_graph,
    multiplies_bfloat16,
    multiplies_float16,
)
from liger_core.schema import Schema, read_schema

# Custom op → its kernel, for code that watches operations.
KERNELS: dict[Any, "Kernel"] = {}
_PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, list, tuple})

Outputs = tuple[Tensor | None, ...]


class Kernel:
    """A custom op `namespace::name` made of `allocate(*inputs) -> outputs` and `launch(*outputs, *inputs)`.

    launch    its signature is the schema: outputs before the slash, `def launch(y, /, x, weight, eps)`, inputs behind
              it. A parameter that is annotated with a NamedTuple stands for all of its fields
    allocate  returns a tuple with new memory for every output, None for an optional one that is not wanted
    recycle   like allocate, but may hand out the inputs themselves: for a backward whose graph is freed behind it
    scratch   the bytes that launch takes beside its outputs, for `liger plan`; None if these are few
    """

    def __init__(
        self, namespace: str, name: str, allocate: Callable[..., Outputs], launch: Callable[..., None],
        recycle: Callable[..., Outputs] | None = None, scratch: Callable[..., int] | None = None,
    ) -> None:  # fmt: skip
        self.name = f"{namespace}::{name}"
        self.allocate, self.launch, self.recycle, self.scratch = allocate, launch, recycle, scratch
        self.schema, self.groups, self.output_groups = read_schema(self.name, launch)
        library = library_of(namespace)
        self.op = define(library, name, self.schema, self._fake)
        library.impl(name, self._dispatched, "CompositeExplicitAutograd")
        KERNELS[self.op] = self
        self.count = len(self.schema.returns)
        self.single = self.count == 1

    def __call__(self, *args: Any) -> Outputs:
        if torch.compiler.is_compiling() or dispatch_stack_length() or not _PLAIN.issuperset(map(type, args)):
            outputs = self.op(*args)
            return (outputs,) if self.single else outputs
        if autocast_is_on():
            with DisableAutocast():
                return self._plainly(args)
        return self._plainly(args)

    def _plainly(self, args: tuple[Any, ...]) -> Outputs:
        """Run without the dispatcher; a backward that frees its graph may recycle its inputs."""
        # With retain_graph=True, another pass may need the saved tensors.
        if self.recycle is not None and graph_task() != -1 and not keeps_graph():
            return self.execute(args, self.recycle)
        return self.execute(args, self.allocate)

    def execute(self, args: tuple[Any, ...], allocate: Callable[..., Outputs]) -> Outputs:
        """Allocate and launch; backends override this to put a device guard around it."""
        args = self.grouped(args)
        outputs = allocate(*args)
        if not isinstance(outputs, tuple) or len(outputs) != self.count:
            self._refuse_outputs(outputs)
        self.launch(*(outputs if self.output_groups is None else _grouped(self.output_groups, outputs)), *args)
        return outputs

    def grouped(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the custom op's flat arguments as allocate, recycle and launch take them."""
        return args if self.groups is None else _grouped(self.groups, args)

    def _refuse_outputs(self, outputs: Any) -> NoReturn:
        wanted = ", ".join(r.name for r in self.schema.returns)
        got = f"{len(outputs)} values" if isinstance(outputs, tuple) else type(outputs).__name__
        raise TypeError(
            f"{self.name}: allocate must return a tuple of {wanted}, as launch takes them before its slash, got {got}"
        )

    def check_plain(self, args: tuple[Any, ...], op: str) -> None:
        """Refuse a call under torch.func transforms and forward-mode AD."""
        if is_transforming() and any(map(_is_transformed, args)):
            self.refuse_transform(op)

    def refuse_transform(self, op: str) -> NoReturn:
        """Decline a call under torch.func or forward-mode AD; most references, being plain PyTorch, support both."""
        raise Unsupported("torch.func transforms and forward-mode AD see plain PyTorch only")

    def _dispatched(self, *args: Any) -> Any:
        with DisableAutocast():
            outputs = self.execute(args, self.allocate)
        return outputs[0] if self.single else tuple(outputs)

    def _fake(self, *args: Any) -> Any:
        outputs = self.allocate(*self.grouped(args))
        if not isinstance(outputs, tuple) or len(outputs) != self.count:
            self._refuse_outputs(outputs)
        return outputs[0] if self.single else tuple(outputs)


class _ReferenceKernel(Kernel):
    """A reference that is a kernel itself: there is no other implementation to fall back to."""

    def refuse_transform(self, op: str) -> NoReturn:
        raise GradientError(
            f"{op}: the gradient must be taken by backward() or torch.autograd.grad, got a torch.func transform or "
            "forward-mode AD; write this part in plain PyTorch"
        )


def reference_kernel(
    name: str,
    allocate: Callable[..., Outputs],
    launch: Callable[..., None],
    recycle: Callable[..., Outputs] | None = None,
    scratch: Callable[..., int] | None = None,
) -> Kernel:
    """Return a kernel of the pure-PyTorch references."""
    return _ReferenceKernel("liger_reference", name, allocate, launch, recycle, scratch)


@cache
def library_of(namespace: str) -> torch.library.Library:
    """Return the library that defines the custom ops of a namespace."""
    return torch.library.Library(namespace, "FRAGMENT")


def define(library: torch.library.Library, name: str, schema: Schema | str, fake: Callable[..., Any]) -> Any:
    """Define a custom op and return it."""
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, library.ns), name).default


@constant_when_traced
def is_transforming() -> bool:
    """Whether a torch.func transform or a level of forward-mode AD is open."""
    return getattr(forward_ad, FORWARD_LEVEL, 0) >= 0 or interpreter_stack() is not None


def _is_transformed(value: Any) -> bool:
    """Whether a value is batched, differentiated by torch.func, or has a tangent."""
    if not isinstance(value, Tensor):
        return False
    return is_wrapped(value) or forward_ad.unpack_dual(value).tangent is not None


def _grouped(groups: list[tuple[Any, int]], values: Sequence[Any]) -> tuple[Any, ...]:
    """Group flat values into the parameters whose fields they are."""
    grouped, start = [], 0
    for make, count in groups:
        grouped.append(values[start] if make is None else make(values[start : start + count]))
        start += count
    return tuple(grouped)


# 4 MiB in float32: of the powers of two from 256 to 4096, the fastest for heads on a CPU with AVX2.
TILE = 1024


def _emulated() -> frozenset[torch.dtype]:
    """Return the 16-bit dtypes that PyTorch multiplies slowly on this processor; none if that is unknown."""
    if not torch.backends.mkldnn.is_available():
        return frozenset({torch.bfloat16, torch.float16})
    multiplies = {torch.bfloat16: multiplies_bfloat16(), torch.float16: multiplies_float16()}
    processor: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    # Without AVX512_BF16, oneDNN also multiplies in bfloat16, but five times as slowly as in float32.
    if processor.get("avx512_f") and not processor.get("avx512_bf16"):
        multiplies[torch.bfloat16] = False
    return frozenset(dtype for dtype, fast in multiplies.items() if not fast)


EMULATED = _emulated()


@contextmanager
def plain_matmuls() -> Iterator[None]:
    """Multiply in the dtype of the operands, in all threads: for results whose error others are judged by."""
    global EMULATED
    before, EMULATED = EMULATED, frozenset()
    try:
        yield
    finally:
        EMULATED = before


def multiply(out: Tensor, a: Tensor, b: Tensor, base: Tensor | None = None) -> None:
    """Compute out = base + a @ b in the dtype of out or a wider one; base is a row, a matrix or out itself."""
    if EMULATED and a.dtype in EMULATED and a.is_cpu:
        _multiply_in_float32(out, a, b, base)
    elif out.dtype == a.dtype:
        _ = torch.mm(a, b, out=out) if base is None else torch.addmm(base, a, b, out=out)
    elif out.dtype == torch.float32 and a.is_cuda:
        if base is None:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(base, a, b, out_dtype=torch.float32, out=out)
    else:
        multiply(out, a.to(out.dtype), b.to(out.dtype), base)


def _multiply_in_float32(out: Tensor, a: Tensor, b: Tensor, base: Tensor | None) -> None:
    """Multiply tile by tile in float32: a float32 copy of a whole weight may not fit."""
    wide = torch.promote_types(out.dtype, torch.float32)
    for rows in slices(slice(0, out.shape[0]), TILE):
        for columns in slices(slice(0, out.shape[1]), TILE):
            tile = out[rows, columns]
            total = tile if tile.dtype == wide else torch.empty_like(tile, dtype=wide)
            if base is None:
                total.zero_()
            elif base is not out or total is not tile:
                total.copy_(base[columns] if base.dim() == 1 else base[rows, columns])
            for inner in slices(slice(0, a.shape[1]), TILE):
                total.addmm_(a[rows, inner].to(wide), b[inner, columns].to(wide))
            if total is not tile:
                tile.copy_(total)


def slices(rows: slice, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` rows that cover the rows."""
    for start in range(rows.start, rows.stop, most):
        yield slice(start, min(start + most, rows.stop))
