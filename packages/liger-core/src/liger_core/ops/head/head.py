# SPDX-License-Identifier: Apache-2.0
"""The head of an op: its tensors with their checks, the rows that count, wrong calls, workloads and work.

Matmuls leave out the rows whose target is ignored.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import DeviceError, DtypeError, OptionError, ShapeError, TargetError
from liger_core.op import Misuse, Product, Work, Workload, autocast_dtype
from liger_core.ops._inputs import CLASSES, ROWS, integers, misuse_table, normal, workload
from liger_core.ops._softmax_loss import targets_with_ignored
from liger_core.ops.head.shards import VocabShard, run_distributed, vocabulary
from liger_core.private_torch import dispatch_stack_length

Chunk = int | Literal["report"] | None

# Where a matmul takes less than this, about 0.15 ms on an H200, waiting for the number of ignored rows costs more than
# they do.
PACK_FLOPS = 10**11
# Packed rows come in whole tiles of a matmul, and copying the others' rows pays from 1/32 of ignored ones on.
PACK_TILE = 128
PACK_SHARE = 32


class Head(NamedTuple):
    """Rows (N, H), the weights that turn them into logits, and the target class of each (N,), or several (N, K)."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None

    def taken(self, rows: "CountedRows") -> Self:
        """Return the head of the rows that count."""
        return self._replace(hidden=rows.take(self.hidden), target=rows.take(self.target))

    def of_classes(self, count: int) -> Self:
        """Return the head without the rows of weight that are past these classes."""
        return self._replace(weight=self.weight[:count], bias=None if self.bias is None else self.bias[:count])


class CountedRows:
    """The rows of hidden whose target counts.

    Their number is requested at once and waited for when `index` is first read.

    classes  of a row of logits on each rank
    number   of rows that count, where an earlier pass knows it; -1 if all rows are taken
    """

    def __init__(
        self, hidden: Tensor, target: Tensor, ignore_index: int, classes: int, pack: bool, number: int | None = None
    ) -> None:
        self.mask: Tensor | None = None
        self.number = -1 if number is None else number
        self.arriving: Tensor | None = None
        if not pack or number == -1:
            return
        if target.is_cuda:
            # A CUDA graph cannot wait, so it keeps all rows.
            if 2 * hidden.numel() * classes < PACK_FLOPS or torch.cuda.is_current_stream_capturing():
                return
            self.mask = target != ignore_index
            if number is None:
                self.arriving = self.mask.sum().to("cpu", non_blocking=True)
                self.arrived = torch.cuda.Event()
                self.arrived.record()
        elif target.device.type == "cpu":
            self.mask = target != ignore_index

    @functools.cached_property
    def index(self) -> Tensor | None:
        """The rows to take, or None for all of them."""
        if self.mask is None:
            self.number = -1
            return None
        rows = self.mask.shape[0]
        if not self.mask.is_cuda:
            index = self.mask.nonzero()[:, 0]
            self.number = index.shape[0]
            return index if self.number < rows else None
        if self.arriving is not None:
            self.arrived.synchronize()
            self.number = int(self.arriving)
        whole = -(-self.number // PACK_TILE) * PACK_TILE
        if whole > rows - rows // PACK_SHARE:
            return None
        # Ignored rows fill the last tile; they have neither loss nor gradient.
        return self.mask.to(torch.uint8).argsort(descending=True, stable=True)[:whole]

    def take(self, full: Any) -> Any:
        """The rows that count of a tensor, or of each field of a tuple; None stays None."""
        if self.index is None or full is None:
            return full
        return full[self.index] if isinstance(full, Tensor) else type(full)._make(map(self.take, full))

    def like(self, full: Any) -> Any:
        """Return memory for the counted rows that stands for `full`; `full` itself if none is left out."""
        if self.index is None or full is None:
            return full
        if isinstance(full, Tensor):
            return full.new_empty(self.index.shape[0], *full.shape[1:])
        return type(full)._make(map(self.like, full))

    def scatter(self, taken: Any, full: Any) -> None:
        """Put results of the rows that count in their places. Other rows get 0, or -1 where the results are classes."""
        if self.index is None or taken is None or full is None:
            return
        if isinstance(full, Tensor):
            full.fill_(0 if full.is_floating_point() else -1).index_copy_(0, self.index, taken)
            return
        for source, target in zip(taken, full, strict=True):
            self.scatter(source, target)


def takes_dtensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an implementation (hidden, weight, …, vocab) also accept weight as a DTensor with a sharded vocabulary.

    Rows may be sharded over the other mesh dimensions. If hidden is a DTensor, so are the results: per-token results
    are sharded like the rows, and a sum is partial. If hidden is a plain tensor, the results are plain tensors.
    """

    @functools.wraps(function)
    def implementation(hidden: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
        if not hasattr(weight, "device_mesh"):
            return function(hidden, weight, *args, **options)
        bound = inspect.signature(function).bind(hidden, weight, *args, **options).arguments
        return run_distributed(function, **bound)

    return implementation


def autocast_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of the matmul in autocast's dtype, where it is on."""
    low = autocast_dtype(hidden.device.type)
    if low is None:
        return hidden, weight, bias
    return hidden.to(low), weight.to(low), None if bias is None else bias.to(low)


def check_head(
    name: str, head: Head, vocab: VocabShard | None = None, several: bool = False, **options: Any
) -> int:  # fmt: skip
    """Check that rows, weight, targets, bias, the shard and the options of chunks fit each other, and return the number
    of all classes; several targets a row are in a last dimension of their own."""
    hidden, weight, target, bias = head
    checks.tensor(name, "target", target)
    checks.floating(name, 2, hidden=hidden, weight=weight, bias=bias)
    checks.at_least_one_dimension(name, "hidden", hidden)
    if hidden.shape[-1] == 0:
        checks.misshapen(name, "hidden must have a width of at least 1", hidden)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or (vocab is None and not weight.shape[0]):
        checks.mismatch(name, "weight", weight, f"(classes, {hidden.shape[-1]})", "hidden", hidden)
    check_rows(name, "target", target, hidden, several)
    checks.vector(name, "bias", bias, weight.shape[0], "weight", weight)
    checks.same_device(name, "hidden", hidden, target=target)
    if autocast_dtype(hidden.device.type) is None:
        checks.same_dtype(name, "hidden", hidden, weight=weight, bias=bias)
    if vocab is not None:
        _check_vocab(name, vocab)
    _check_chunks(name, hidden, weight, vocab, **options)
    return weight.shape[0] if vocab is None else vocab.classes


def _check_vocab(op: str, vocab: VocabShard) -> None:
    if not isinstance(vocab, VocabShard):
        checks.fail(OptionError, op, f"vocab must be a VocabShard(group, start, classes), got {type(vocab).__name__}")
    group, start, classes = vocab[:3]
    checks.integer(op, "vocab.start", start)
    checks.integer(op, "vocab.classes", classes)
    if classes < 1 or start < 0:
        sentence = f"vocab must have start ≥ 0 and classes > 0, got start={start} and classes={classes}"
        checks.fail(OptionError, op, sentence)
    if not isinstance(group, (str, torch.distributed.ProcessGroup)):
        checks.fail(OptionError, op, f"vocab.group must be a process group, got {type(group).__name__}")


def _check_chunks(
    name: str, hidden: Tensor, weight: Tensor, vocab: VocabShard | None, accumulate_dtype: torch.dtype | None = None,
    chunk: Chunk = None, budget: int | None = None, main_grad: Tensor | None = None, **rest: Any,
) -> None:  # fmt: skip
    """Check how the rows are cut and the gradient of weight is summed; there may be other options among these."""
    checks.same_device(name, "hidden", hidden, main_grad=main_grad)
    checks.constant(name, main_grad=main_grad)
    floating = isinstance(accumulate_dtype, torch.dtype) and accumulate_dtype.is_floating_point
    if accumulate_dtype is not None and not floating:
        checks.fail(DtypeError, name, f"accumulate_dtype must be a floating dtype, got {accumulate_dtype}")
    rows = isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0
    if chunk is not None and chunk != "report" and not rows:
        checks.fail(OptionError, name, f"chunk must be a positive number of rows, 'report' or None, got {chunk!r}")
    if budget is not None:
        row = vocabulary(weight, vocab).usual() * hidden.element_size()
        if chunk is not None:
            sentence = f"budget and chunk both say how many rows to hold, got budget={budget} and chunk={chunk!r}"
            checks.fail(OptionError, name, f"{sentence}; give one")
        if not isinstance(budget, int) or budget < row:
            checks.fail(OptionError, name, f"budget must hold at least one row of logits, {row} bytes, got {budget!r}")
    if main_grad is None:
        return
    if main_grad.shape != weight.shape or not main_grad.is_contiguous():
        sentence = f"main_grad must be contiguous and have shape {checks.shape(weight)} like weight"
        checks.misshapen(name, sentence, main_grad, "" if main_grad.is_contiguous() else " with other strides")
    if main_grad.dtype != torch.float32:
        checks.fail(DtypeError, name, f"main_grad must have dtype torch.float32, got {main_grad.dtype}")
    # The kernels' schemas do not declare the addition: functionalization of an op that both mutates and returns
    # optionals fails.
    if torch.compiler.is_compiling() or dispatch_stack_length():
        sentence = "main_grad must be given in an eager call, got one that is traced; add weight.grad to it instead"
        checks.fail(OptionError, name, sentence)


def check_rows(name: str, label: str, tensor: Tensor, hidden: Tensor, several: bool = False) -> None:
    """Check that a tensor has one number for each row of hidden, or several."""
    rows, shape = tuple(hidden.shape[:-1]), tuple(tensor.shape)
    if shape != rows and not (several and len(shape) == hidden.dim() and shape[:-1] == rows and shape[-1] > 0):
        wanted = f"{rows} or ({', '.join(map(str, (*rows, 'K')))})" if several else str(rows)
        checks.mismatch(name, label, tensor, wanted, "hidden", hidden)


def head_calls(device: torch.device, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a function (rows, width, classes, draw) → hidden, weight and the targets that draw makes, by default some
    of them ignored."""

    def call(
        rows: tuple[int, ...], width: int, classes: int, draw: Any = targets_with_ignored, scale: float = 0.3
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = normal(device, dtype, *rows, width), normal(device, dtype, classes, width, scale=scale)
        return hidden, weight, draw(device, classes, *rows)

    return call


def head_misuses(name: str, device: torch.device, several: bool = False) -> Iterator[Misuse]:
    """Yield the wrong calls that all ops with a head share; several targets a row may be allowed."""
    zeros, wanted = functools.partial(torch.zeros, device=device), "(3,) or (3, K)" if several else "(3,)"
    x, w, t = zeros(3, 8), zeros(10, 8), zeros(3, dtype=torch.int64)
    number, rows = "must be a finite number", "chunk must be a positive number of rows, 'report' or None, got"
    both = "budget and chunk both say how many rows to hold, got budget=4096 and chunk=2; give one"
    like, nan, infinity = "main_grad must be contiguous and have shape (10, 8) like weight", float("nan"), float("inf")
    yield from misuse_table(
        name, (x, w, t),
        ("weight_shape", ShapeError, "weight must have shape (classes, 8) to match hidden (3, 8), got (10, 7)", {},
         x, w[:, :7], t),
        ("no_width", ShapeError, "hidden must have a width of at least 1, got (3, 0)", {}, x[:, :0], w[:, :0], t),
        ("target_shape", ShapeError, f"target must have shape {wanted} to match hidden (3, 8), got (2,)", {},
         x, w, t[:2]),
        ("bias_shape", ShapeError, "bias must have shape (10,) to match weight (10, 8), got (8,)", {"bias": x[0]}),
        ("dtypes", DtypeError, "weight must have dtype torch.float32 like hidden, got torch.bfloat16; cast one of them",
         {}, x, w.bfloat16(), t),
        ("target_dtype", DtypeError, "target must have dtype torch.int64, got torch.float32", {}, x, w, t.float()),
        ("target_none", DtypeError, "target must be a tensor, got NoneType", {}, x, w, None),
        ("weight_none", DtypeError, "weight must be a tensor, got NoneType", {}, x, None, t),
        ("softcap", OptionError, f"softcap {number} > 0, got -1.0", {"softcap": -1.0}),
        ("logit_scale_nan", OptionError, f"logit_scale {number}, got nan", {"logit_scale": nan}),
        ("logit_scale_inf", OptionError, f"logit_scale {number}, got inf", {"logit_scale": infinity}),
        ("chunk_0", OptionError, f"{rows} 0", {"chunk": 0}),
        ("chunk_True", OptionError, f"{rows} True", {"chunk": True}),
        ("budget_and_chunk", OptionError, both, {"budget": 4096, "chunk": 2}),
        ("budget", OptionError, "budget must hold at least one row of logits, 40 bytes, got 39", {"budget": 39}),
        ("accumulate_dtype", DtypeError, "accumulate_dtype must be a floating dtype, got torch.int32",
         {"accumulate_dtype": torch.int32}),
        ("main_grad_shape", ShapeError, f"{like}, got (10, 7)", {"main_grad": zeros(10, 7)}),
        ("main_grad_dtype", DtypeError, "main_grad must have dtype torch.float32, got torch.float64",
         {"main_grad": w.double()}),
        ("device", DeviceError, f"weight must be on {x.device} like hidden, got meta", {}, x, w.to("meta"), t),
    )  # fmt: skip
    for value in (10, -1) if device.type == "cpu" else ():
        message = f"{name}: every target must be in [0, 10) or ignore_index=-100, got {value}"
        wrong = (x, w, torch.tensor([0, 1, value]))
        yield Misuse(f"target_range_{value}", wrong, {}, TargetError, message)


def head_workload(
    rows: int, width: int, classes: int, axis: str = "", mode: str = "", quick: bool = False, targets: int = 0,
    **options: Any,
) -> Workload:  # fmt: skip
    """A head of these sizes and its targets, one or several a row, of which the mode "half_ignored" ignores half."""

    def make(device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = normal(device, dtype, rows, width)
        weight = normal(device, dtype, classes, width, scale=width**-0.5)
        target = integers(device, classes, rows, targets) if targets else integers(device, classes, rows)
        if mode == "half_ignored":
            # Scattered, as prompts and padding of a batch leave them.
            target[torch.randperm(rows, device=device)[: rows // 2]] = -100
        return (hidden, weight, target), dict(options)

    base = workload(make, axis, quick, N=rows, H=width, V=classes)
    return replace(base, name=f"{base.name}-{mode}") if mode else base


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
