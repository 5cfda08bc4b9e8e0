# SPDX-License-Identifier: Apache-2.0
"""Logits that are not computed until somebody looks at them.

While a patched model's own forward runs, its output head returns this plain object (no tensor: a tensor subclass cannot
be compiled, and data-parallel wrappers would read it). It holds the head's input and remembers scaling, tanh and casts.
The loss takes it as it is; anything else that touches it gets the logits that the unpatched model would have computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from liger_core.private_torch import forward_mode_enabled, saved_tensors_hooks
from liger_hf.errors import LogitsError
from liger_hf.repeated import Numbers, Settings, draws, settings_of
from liger_hf.rules.head.projection import LAZY, Step, compute, replay
from liger_hf.rules.head.weights import weights_of


class Cell:
    """The state that all objects derived from one call of the head share.

    used     a loss was computed from them, so that nobody has to see the logits themselves
    forward  the model's forward that called the head; None in compiled code
    closed   the model has returned them
    changed  somebody wrote into the logits
    weights  those of the head; None if only its hooks know them
    version  the version counter of the head's input; None in compiled code
    settings  those of a head that has some; None of a linear layer, and in compiled code
    numbers  the random numbers that the head drew when logits or a loss were first computed
    repeats  they were missing within a checkpoint, whose recomputation must not find them
    in_a_function  the head was called within a custom autograd function, which then differentiates the logits itself
    """

    def __init__(self, hidden: Tensor, head: nn.Module, autocast: tuple[str, torch.dtype] | None) -> None:
        self.used = False
        self.forward = None if torch.compiler.is_compiling() else LAZY.forward
        self.closed = False
        self.changed = False
        self.weights = weights_of(head)
        self.version = None if torch.compiler.is_compiling() or hidden.is_inference() else hidden._version
        self.autocast = autocast
        self.settings = settings_of(head)
        self.numbers: Numbers | None = None
        self.repeats = False
        self.in_a_function = not torch.compiler.is_compiling() and in_a_function()

    @property
    def open(self) -> bool:
        """The model's forward still runs."""
        return not self.closed and (self.forward is None or self.forward.runs)

    def again(self, head: nn.Module, device: torch.device) -> AbstractContextManager[None]:
        """The head as it was in its call.

        Whatever is computed first draws random numbers, as the head would have; everything else the same ones.
        """
        return nullcontext() if self.settings is None else self._again(self.settings, head, device)

    @contextmanager
    def _again(self, settings: Settings, head: nn.Module, device: torch.device) -> Iterator[None]:
        with settings.again():
            drawn = self.numbers
            if drawn is None and draws(head):
                self.numbers = Numbers(device)
            with nullcontext() if drawn is None else drawn.again():
                yield


# Functions that take lazy logits as they are; the module of the losses fills it.
LOSSES: dict[Any, Any] = {}
# What sees the gradient of a tensor.
GRADIENTS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


class LazyLogits:
    """`steps` applied to `head(hidden)`; `materialize()` computes that once.

    view      rows of other lazy logits
    constant  made without gradients, like the tensor that plain logits would be: none flows through them
    """

    def __init__(
        self,
        hidden: Tensor,
        head: nn.Module,
        classes: int,
        dtype: torch.dtype,
        cell: Cell,
        steps: tuple[Step, ...] = (),
        view: bool = False,
        constant: bool = False,
    ) -> None:
        self.hidden = hidden
        self.head = head
        self.classes = classes
        self.dtype = dtype
        self.cell = cell
        self.steps = steps
        self.view_of_another = view
        self.constant = constant
        # The logits; and their values alone, which are all that a look without gradients needs.
        self.real: Tensor | None = None
        self.values: Tensor | None = None

    def materialize(self, keep: bool = False) -> Tensor:
        """The logits themselves; where gradients are off, their values. keep: also within a checkpoint."""
        not_in_a_function(self)
        found = self.available()
        if found is not None:
            return found
        still_valid(self)
        if not keep and _saves_elsewhere():
            return self._computed()
        if not self.constant and not torch.is_grad_enabled():
            self.values = self._computed()
            return self.values
        self.real, self.values = self._computed(), None
        return self.real

    def available(self) -> Tensor | None:
        """Return what `materialize` returns if that needs no computing, else None."""
        found = self.values if self.real is None and not torch.is_grad_enabled() else self.real
        if (found is None or self.cell.repeats) and _saves_elsewhere():
            self.cell.repeats = True
            return None
        return found

    def _computed(self) -> Tensor:
        if torch.is_inference_mode_enabled() and not torch.compiler.is_compiling():
            # Tensors made in inference mode could not be used outside it.
            with torch.inference_mode(False), torch.no_grad():
                return self._computed()
        enabled = torch.is_grad_enabled() and not self.constant
        with torch.set_grad_enabled(enabled), self.cell.again(self.head, self.hidden.device):
            return replay(compute(self.head, self.hidden, self.cell.weights, self.cell.autocast), self.steps)

    def _then(self, dtype: torch.dtype, *step: Any, same: bool = False) -> Any:
        """same: plain logits would be returned as they are."""
        not_in_a_function(self)
        constant = self.constant or not (same or torch.is_grad_enabled())
        return LazyLogits(
            self.hidden, self.head, self.classes, dtype, self.cell, (*self.steps, step), constant=constant
        )

    # -- what a head does between its projection and the loss

    def __mul__(self, other: Any) -> Any:
        if self.available() is None and isinstance(other, (int, float)):
            return self._then(self.dtype, "mul", other)
        return self.materialize() * _plain(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if self.available() is None and isinstance(other, (int, float)):
            return self._then(self.dtype, "div", other)
        return self.materialize() / _plain(other)

    def __add__(self, other: Any) -> Any:
        if (
            self.available() is None
            and isinstance(other, Tensor)
            and other.numel() == self.classes == other.shape[-1]
            and other.dim() <= self.ndim
        ):
            return self._then(torch.promote_types(self.dtype, other.dtype), "add", other)
        return self.materialize() + _plain(other)

    __radd__ = __add__

    def tanh(self) -> Any:
        return self._then(self.dtype, "tanh") if self.available() is None else self.materialize().tanh()

    def float(self) -> Any:
        return self.to(torch.float32)

    def double(self) -> Any:
        return self.to(torch.float64)

    def half(self) -> Any:
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    def type_as(self, other: Any) -> Any:
        return self.to(other)

    def contiguous(self, **options: Any) -> Any:
        return self.materialize().contiguous(**options) if options else self

    def to(self, *args: Any, **options: Any) -> Any:
        dtype, device = options.get("dtype"), options.get("device")
        for value in args:
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, (Tensor, LazyLogits)):
                dtype, device = value.dtype, value.device
            elif isinstance(value, (str, int, torch.device)) and not isinstance(value, bool):
                device = value
        if self.available() is not None or options.get("copy") or options.get("memory_format"):
            return self.materialize().to(*map(_plain, args), **options)
        logits = self
        # Moved when they are computed: accelerate brings the outputs of a model on several devices to the first one.
        if device is not None and torch.empty(0, device=device).device != self.device:
            logits = logits._then(logits.dtype, "to", torch.empty(0, device=device).device)
        # A step even where the dtype seems to be this one: a head of another kind may return a dtype of its own.
        return logits if dtype is None else logits._then(dtype, "to", dtype, same=dtype == logits.dtype)

    def reshape(self, *sizes: Any) -> Any:
        sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        if self.available() is None and _keeps_classes(sizes, self.shape):
            return self._rows(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return self.materialize().reshape(*sizes)

    def view(self, *sizes: Any) -> Any:
        if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
            return self.materialize().view(sizes[0])
        return self.reshape(*sizes)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = end_dim % self.ndim
        if self.available() is None and last < self.ndim - 1:
            return self._rows(self.hidden.flatten(start_dim, last))
        return self.materialize().flatten(start_dim, end_dim)

    def _rows(self, hidden: Tensor) -> Any:
        not_in_a_function(self)
        constant = self.constant or not torch.is_grad_enabled()
        return LazyLogits(
            hidden, self.head, self.classes, self.dtype, self.cell, self.steps, view=True, constant=constant
        )

    def __getitem__(self, index: Any) -> Any:
        # The random numbers of a row depend on the rows before it.
        whole = self.available() is not None or self.cell.numbers is not None
        rows = None if whole else _rows(index, self.ndim)
        if rows is None:
            return self.materialize()[_plain(index)]
        return self._rows(self.hidden[rows])

    # -- what is known without computing anything

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.classes))

    @property
    def device(self) -> torch.device:
        moves = [step[1] for step in self.steps if step[0] == "to" and isinstance(step[1], torch.device)]
        return moves[-1] if moves else self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def requires_grad(self) -> bool:
        return self.hidden.requires_grad or any(p.requires_grad for p in self.head.parameters())

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    # -- everything else computes them

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and not kwargs:
            return args[0].tanh()
        if function in LOSSES:
            return LOSSES[function](*args, **(kwargs or {}))
        if function is torch.autograd.grad:
            for logits in tree_leaves((args[1:2], kwargs)):
                if isinstance(logits, cls):
                    logits._unwatched("torch.autograd.grad")
        return function(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"LazyLogits has no attribute {name!r}")
        if name.endswith("_"):
            self._writable(f".{name}()")
        if name in GRADIENTS:
            self._unwatched(f".{name}")
        return getattr(self.materialize(), name)

    def detach(self) -> Tensor:
        with torch.no_grad():
            return self.materialize().detach()

    def __setitem__(self, index: Any, value: Any) -> None:
        self._writable("an assignment to elements")
        self.materialize()[_plain(index)] = _plain(value)

    def _write(self, name: str, other: Any) -> LazyLogits:
        self._writable(f"__{name}__")
        getattr(self.materialize(), f"__{name}__")(_plain(other))
        return self

    def _writable(self, what: str) -> None:
        """Inside the model's forward the logits may be written to; later nobody would see it."""
        if self.view_of_another or not self.cell.open:
            raise LogitsError(
                f"logits: {what} must not change logits that are computed on demand, since it would act on a "
                "temporary; "
                "take a copy with logits.clone(), or call the model with keep_logits=True"
            )
        self.cell.changed = True
        # What is written to has its gradient, also where that is off for the writing.
        with torch.set_grad_enabled(not self.constant):
            self.materialize(keep=True)
            self.cell.repeats = False

    def _unwatched(self, what: str) -> None:
        if self.cell.used:
            raise LogitsError(
                f"logits: {what} would miss the gradient of the loss, since the loss is computed without them, got "
                "logits of a step with "
                "labels; call the model without labels and compute the loss from outputs.logits"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.detach().cpu().__array__(*args, **options)

    def __iter__(self) -> Any:
        return iter(self.materialize())

    def __bool__(self) -> bool:
        return bool(self.materialize())

    def __contains__(self, value: Any) -> bool:
        return _plain(value) in self.materialize()

    __hash__ = object.__hash__


def _operator(name: str) -> Any:
    def apply(self: LazyLogits, *others: Any) -> Any:
        return getattr(self.materialize(), name)(*map(_plain, others))

    apply.__name__ = name
    return apply


OPERATORS = (
    "sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs invert "
    "eq ne lt le gt ge and rand or ror xor rxor float int"
)
for _name in OPERATORS.split():
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))
# Without them, Python would bind the name to other logits, and nobody else would see what was written.
for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(LazyLogits, f"__{_name}__", partialmethod(LazyLogits._write, _name))


def _saves_elsewhere() -> bool:
    """Whether hooks get what autograd saves: those of activation checkpointing drop it, and recompute it in the
    backward pass."""
    return not torch.compiler.is_compiling() and saved_tensors_hooks(True) is not None


def _plain(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.materialize()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _keeps_classes(sizes: Any, shape: torch.Size) -> bool:
    """The sizes regroup rows only; all of the vocabulary stays the last dimension."""
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return False
    rows = 1
    for size in sizes[:-1]:
        rows *= size
    count = shape.numel() // shape[-1]
    if sizes[-1] == -1:
        return -1 not in sizes[:-1] and rows == count
    return sizes[-1] == shape[-1] and (rows == count or -1 in sizes[:-1])


def _rows(index: Any, dimensions: int) -> tuple[Any, ...] | None:
    """The index for hidden, if it selects rows by numbers and slices only and takes all of the vocabulary."""
    parts = index if isinstance(index, tuple) else (index,)
    if any((part is not Ellipsis and not isinstance(part, (int, slice))) or isinstance(part, bool) for part in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (dimensions - len(parts) + 1), *parts[at + 1 :])
    if len(parts) > dimensions or Ellipsis in parts:
        return None
    if len(parts) == dimensions:
        last = parts[-1]
        if not isinstance(last, slice) or last != slice(None):
            return None
        parts = parts[:-1]
    return parts


def in_a_function() -> bool:
    """Whether a custom autograd function runs its forward pass: torch switches forward-mode AD off there, and otherwise
    only in inference mode."""
    return not (forward_mode_enabled() or torch.is_inference_mode_enabled())


def not_in_a_function(logits: LazyLogits) -> None:
    """Raise LogitsError within a custom autograd function that was called with these logits, to which it would give no
    gradient."""
    if torch.compiler.is_compiling() or logits.cell.in_a_function or not in_a_function():
        return
    if logits.requires_grad and not logits.constant:
        raise LogitsError(
            "logits: a custom autograd function, or reentrant checkpointing, must be given a tensor, since it gives no "
            "gradient to anything else, "
            "got logits that are computed on demand; call the model with keep_logits=True"
        )


def still_valid(logits: LazyLogits) -> None:
    """Raises LogitsError if the logits would be others than those of the forward pass."""
    if logits.view_of_another and logits.cell.changed:
        raise LogitsError(
            "logits: a slice must be used before the logits that it was taken from are written to, they were changed "
            "in place; "
            "write to a copy made with logits.clone()"
        )
    if torch.compiler.is_compiling():
        return
    if logits.cell.version is not None and logits.cell.version != logits.hidden._version:
        raise LogitsError(
            "logits: they must be read before the hidden states that the output head was called with are changed in "
            "place; "
            "read outputs.logits first, or change a copy of the hidden states"
        )
    if not (logits.cell.open or logits.cell.weights is None):
        logits.cell.weights.check(logits.head)
