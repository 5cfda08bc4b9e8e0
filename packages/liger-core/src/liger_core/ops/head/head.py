# SPDX-License-Identifier: Apache-2.0
"""The head of an op: its tensors with their checks, wrong calls, workloads and work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError, TargetError
from liger_core.op import Misuse, Product, Work, Workload, autocast_dtype
from liger_core.ops._inputs import CLASSES, ROWS, integers, misuses_of, normal, workload
from liger_core.ops.head.rows import CountedRows
from liger_core.ops.head.shards import VocabShard, held_classes
from liger_core.private_torch import dispatch_stack_length

Chunk = int | Literal["report"] | None


class Head(NamedTuple):
    """Rows (N, H), the weights that turn them into logits, and the target class of each (N,), or several (N, K)."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None

    def taken(self, rows: CountedRows) -> Self:
        """Return the head of the rows that count."""
        return self._replace(hidden=rows.take(self.hidden), target=rows.take(self.target))

    def of_classes(self, count: int) -> Self:
        """Return the head without the rows of weight that are past these classes."""
        return self._replace(weight=self.weight[:count], bias=None if self.bias is None else self.bias[:count])


def autocast_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of the matmul in autocast's dtype, where it is on."""
    low = autocast_dtype(hidden.device.type)
    if low is None:
        return hidden, weight, bias
    return hidden.to(low), weight.to(low), None if bias is None else bias.to(low)


def check_head(name: str, head: Head, several: bool = False, classes: int = 1) -> None:
    """Rows, weight, targets and bias must fit each other; several targets a row are in a last dimension of their own.

    `classes` is how many weight must have at least.
    """
    hidden, weight, target, bias = head
    checks.tensor(name, "target", target)
    checks.floating(name, 2, hidden=hidden, weight=weight, bias=bias)
    checks.at_least_one_dimension(name, "hidden", hidden)
    if hidden.shape[-1] == 0:
        checks.fail(ShapeError, name, f"hidden must have a width of at least 1, got {checks.shape(hidden)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] < classes:
        wanted = f"(classes, {hidden.shape[-1]})"
        checks.fail(
            ShapeError,
            name,
            f"weight must have shape {wanted} to match hidden {checks.shape(hidden)}, got {checks.shape(weight)}",
        )
    check_rows(name, "target", target, hidden, several)
    checks.vector(name, "bias", bias, weight.shape[0], "weight", weight)
    checks.same_device(name, "hidden", hidden, target=target)
    if autocast_dtype(hidden.device.type) is None:
        checks.same_dtype(name, "hidden", hidden, weight=weight, bias=bias)


def check_chunks(
    name: str,
    head: Head,
    vocab: VocabShard | None,
    accumulate_dtype: torch.dtype | None = None,
    chunk: Chunk = None,
    budget: int | None = None,
    main_grad: Tensor | None = None,
    **rest: Any,
) -> None:
    """The options of how the rows are cut and the gradient of weight is summed; there may be others among them."""
    hidden, weight = head[:2]
    checks.same_device(name, "hidden", hidden, main_grad=main_grad)
    checks.constant(name, main_grad=main_grad)
    if accumulate_dtype is not None and not (
        isinstance(accumulate_dtype, torch.dtype) and accumulate_dtype.is_floating_point
    ):
        checks.fail(DtypeError, name, f"accumulate_dtype must be a floating dtype, got {accumulate_dtype}")
    if (
        chunk is not None
        and chunk != "report"
        and not (isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0)
    ):
        checks.fail(OptionError, name, f"chunk must be a positive number of rows, 'report' or None, got {chunk!r}")
    if budget is not None:
        row = held_classes(weight, vocab) * hidden.element_size()
        if chunk is not None:
            checks.fail(
                OptionError,
                name,
                f"budget and chunk both say how many rows to hold, got budget={budget} and chunk={chunk!r}; give one",
            )
        if not isinstance(budget, int) or budget < row:
            checks.fail(OptionError, name, f"budget must hold at least one row of logits, {row} bytes, got {budget!r}")
    if main_grad is not None:
        wanted = checks.shape(weight)
        if main_grad.shape != weight.shape or not main_grad.is_contiguous():
            got = checks.shape(main_grad) + ("" if main_grad.is_contiguous() else " with other strides")
            checks.fail(
                ShapeError, name, f"main_grad must be contiguous and have shape {wanted} like weight, got {got}"
            )
        if main_grad.dtype != torch.float32:
            checks.fail(DtypeError, name, f"main_grad must have dtype torch.float32, got {main_grad.dtype}")
        # The kernels' schemas do not declare the addition: functionalization of an op that both mutates and returns
        # optionals fails.
        if torch.compiler.is_compiling() or dispatch_stack_length():
            checks.fail(
                OptionError,
                name,
                "main_grad must be given in an eager call, got one that is traced; add weight.grad to it instead",
            )


def check_rows(name: str, label: str, tensor: Tensor, hidden: Tensor, several: bool = False) -> None:
    """One number for each row of hidden, or several."""
    rows = tuple(hidden.shape[:-1])
    if tensor.shape != rows and not (
        several and tensor.dim() == hidden.dim() and tensor.shape[:-1] == rows and tensor.shape[-1] > 0
    ):
        wanted = f"{rows} or ({', '.join(map(str, (*rows, 'K')))})" if several else str(rows)
        checks.fail(
            ShapeError,
            name,
            f"{label} must have shape {wanted} to match hidden {checks.shape(hidden)}, got {checks.shape(tensor)}",
        )


def head_misuses(name: str, device: torch.device, several: bool = False) -> Iterator[Misuse]:
    """The wrong calls that all ops with a head share; several targets a row may be allowed."""
    misuse = misuses_of(name)
    x, w, t = (
        torch.zeros(3, 8, device=device),
        torch.zeros(10, 8, device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )
    message = "weight must have shape (classes, 8) to match hidden (3, 8), got (10, 7)"
    yield misuse("weight_shape", (x, w[:, :7], t), ShapeError, message)
    yield misuse("no_width", (x[:, :0], w[:, :0], t), ShapeError, "hidden must have a width of at least 1, got (3, 0)")
    wanted = "(3,) or (3, K)" if several else "(3,)"
    yield misuse(
        "target_shape", (x, w, t[:2]), ShapeError, f"target must have shape {wanted} to match hidden (3, 8), got (2,)"
    )
    yield misuse(
        "bias_shape", (x, w, t), ShapeError, "bias must have shape (10,) to match weight (10, 8), got (8,)", bias=x[0]
    )
    message = "weight must have dtype torch.float32 like hidden, got torch.bfloat16; cast one of them"
    yield misuse("dtypes", (x, w.bfloat16(), t), DtypeError, message)
    yield misuse("target_dtype", (x, w, t.float()), DtypeError, "target must have dtype torch.int64, got torch.float32")
    yield misuse("target_none", (x, w, None), DtypeError, "target must be a tensor, got NoneType")
    yield misuse("weight_none", (x, None, t), DtypeError, "weight must be a tensor, got NoneType")
    yield misuse("softcap", (x, w, t), OptionError, "softcap must be a finite number > 0, got -1.0", softcap=-1.0)
    for value in (float("nan"), float("inf")):
        yield misuse(
            f"logit_scale_{value}",
            (x, w, t),
            OptionError,
            f"logit_scale must be a finite number, got {value}",
            logit_scale=value,
        )
    for chunk in (0, True):
        message = f"chunk must be a positive number of rows, 'report' or None, got {chunk!r}"
        yield misuse(f"chunk_{chunk}", (x, w, t), OptionError, message, chunk=chunk)
    message = "budget and chunk both say how many rows to hold, got budget=4096 and chunk=2; give one"
    yield misuse("budget_and_chunk", (x, w, t), OptionError, message, budget=4096, chunk=2)
    yield misuse(
        "budget", (x, w, t), OptionError, "budget must hold at least one row of logits, 40 bytes, got 39", budget=39
    )
    message = "accumulate_dtype must be a floating dtype, got torch.int32"
    yield misuse("accumulate_dtype", (x, w, t), DtypeError, message, accumulate_dtype=torch.int32)
    message = "main_grad must be contiguous and have shape (10, 8) like weight, got (10, 7)"
    yield misuse("main_grad_shape", (x, w, t), ShapeError, message, main_grad=torch.zeros(10, 7, device=device))
    message = "main_grad must have dtype torch.float32, got torch.float64"
    yield misuse("main_grad_dtype", (x, w, t), DtypeError, message, main_grad=w.double())
    elsewhere = torch.zeros(10, 8, device="meta")
    yield misuse("device", (x, elsewhere, t), DeviceError, f"weight must be on {x.device} like hidden, got meta")
    if device.type == "cpu":
        for value in (10, -1):
            message = f"every target must be in [0, 10) or ignore_index=-100, got {value}"
            yield misuse(f"target_range_{value}", (x, w, torch.tensor([0, 1, value])), TargetError, message)


def head_workload(
    rows: int,
    width: int,
    classes: int,
    axis: str = "",
    mode: str = "",
    quick: bool = False,
    targets: int = 0,
    **options: Any,
) -> Workload:
    """A head of these sizes and its targets, one or several a row, of which the mode "half_ignored" ignores half."""

    def make(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = normal(device, dtype, rows, width)
        weight = normal(device, dtype, classes, width, scale=width**-0.5)
        target = integers(device, classes, rows, targets) if targets else integers(device, classes, rows)
        if mode == "half_ignored":
            # Scattered, as prompts and padding of a batch leave them.
            target[torch.randperm(rows, device=device)[: rows // 2]] = -100
        return (hidden, weight, target), dict(options)

    made = workload(make, axis, quick, N=rows, H=width, V=classes)
    return replace(made, name=f"{made.name}-{mode}") if mode else made


def head_series() -> Iterator[Workload]:
    """The cost of a head against each of its sizes, and against the rows of a chunk."""
    for rows in ROWS:
        yield head_workload(rows, 4096, 128256, "N")
    for width in (1024, 2048, 4096, 8192):
        yield head_workload(8192, width, 128256, "H")
    for classes in CLASSES:
        yield head_workload(8192, 4096, classes, "V")
    for chunk in (256, 512, 1024, 2048, 4096, 8192):
        yield replace(head_workload(8192, 4096, 128256, mode=f"chunk={chunk}", chunk=chunk), axis=("chunk", chunk))


def work(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Work:
    """One matmul for the logits, and one for each gradient."""
    (classes, width), rows = weight.shape, hidden.numel() // weight.shape[1]
    size = (hidden.numel() + weight.numel()) * hidden.element_size()
    logits = Product(rows, width, classes, "right")
    products = (logits, Product(rows, classes, width, "", "hidden"), Product(classes, rows, width, "left", "weight"))
    operations = 2 * rows * width * classes
    return Work(size, 2 * size, operations, 3 * operations, (logits,), products)
