# SPDX-License-Identifier: Apache-2.0
"""Logits that are not computed until they are read.

While a patched model's own forward runs, its output head returns this plain object. It is not a tensor, because a
tensor subclass cannot be compiled, and data-parallel wrappers would read it. It holds the head's input and records
scaling, tanh and casts. The loss uses it directly; any other use computes the logits of the unpatched model.
"""

from functools import partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from liger_core.private_torch import saved_tensors_hooks
from liger_hf.errors import LogitsError
from liger_hf.rules.head.call import HeadCall, not_in_a_function, still_valid
from liger_hf.rules.head.projection import LogitsStep, compute, replay

# Functions that take lazy logits directly; causal_loss.py fills it.
LOSSES: dict[Any, Any] = {}
# Attributes that read the gradient of a tensor.
GRADIENTS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


class LazyLogits:
    """The result of `steps` applied to `head(hidden)`, which `materialize()` computes once.

    view      whether these are rows of other lazy logits
    constant  whether they were made without gradients, so no gradient flows through them
    """

    def __init__(
        self,
        hidden: Tensor,
        head: nn.Module,
        classes: int,
        dtype: torch.dtype,
        call: HeadCall,
        steps: tuple[LogitsStep, ...] = (),
        view: bool = False,
        constant: bool = False,
    ) -> None:
        self.hidden = hidden
        self.head = head
        self.classes = classes
        self.dtype = dtype
        self.call = call
        self.steps = steps
        self.view_of_another = view
        self.constant = constant
        # The logits, and their values without a graph, for reads while gradients are disabled.
        self.real: Tensor | None = None
        self.values: Tensor | None = None

    def materialize(self, keep: bool = False) -> Tensor:
        """Return the logits, or only their values if gradients are disabled.

        keep  keep the logits even within a checkpoint
        """
        not_in_a_function(self)
        known = self.available()
        if known is not None:
            return known
        still_valid(self)
        if not keep and _saves_elsewhere():
            return self._computed()
        if not self.constant and not torch.is_grad_enabled():
            self.values = self._computed()
            return self.values
        self.real, self.values = self._computed(), None
        return self.real

    def available(self) -> Tensor | None:
        """Return the result of `materialize` if it is already computed, else None."""
        known = self.values if self.real is None and not torch.is_grad_enabled() else self.real
        if (known is None or self.call.repeats) and _saves_elsewhere():
            self.call.repeats = True
            return None
        return known

    def _computed(self) -> Tensor:
        if torch.is_inference_mode_enabled() and not torch.compiler.is_compiling():
            # Tensors made in inference mode cannot be used outside it.
            with torch.inference_mode(False), torch.no_grad():
                return self._computed()
        enabled = torch.is_grad_enabled() and not self.constant
        with torch.set_grad_enabled(enabled), self.call.again(self.head, self.hidden.device):
            return replay(compute(self.head, self.hidden, self.call.weights, self.call.autocast), self.steps)

    def _then(self, dtype: torch.dtype, *step: Any, same: bool = False) -> Any:
        """Return these logits after one more step; `same` means that a tensor would be returned unchanged."""
        not_in_a_function(self)
        constant = self.constant or not (same or torch.is_grad_enabled())
        return LazyLogits(
            self.hidden, self.head, self.classes, dtype, self.call, (*self.steps, step), constant=constant
        )

    def __mul__(self, factor: Any) -> Any:
        if self.available() is None and isinstance(factor, (int, float)):
            return self._then(self.dtype, "mul", factor)
        return self.materialize() * _plain(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if self.available() is None and isinstance(divisor, (int, float)):
            return self._then(self.dtype, "div", divisor)
        return self.materialize() / _plain(divisor)

    def __add__(self, term: Any) -> Any:
        is_row = isinstance(term, Tensor) and term.numel() == self.classes == term.shape[-1]
        if self.available() is None and is_row and term.dim() <= self.ndim:
            return self._then(torch.promote_types(self.dtype, term.dtype), "add", term)
        return self.materialize() + _plain(term)

    __radd__ = __add__

    def tanh(self) -> Any:
        return self._then(self.dtype, "tanh") if self.available() is None else self.materialize().tanh()

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
        # A step, because accelerate moves the outputs of a model on several devices to the first one.
        if device is not None and torch.empty(0, device=device).device != self.device:
            logits = logits._then(logits.dtype, "to", torch.empty(0, device=device).device)
        # A step even if the dtype is equal, because an unusual head may return another dtype than expected.
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
            hidden, self.head, self.classes, self.dtype, self.call, self.steps, view=True, constant=constant
        )

    def __getitem__(self, index: Any) -> Any:
        # The random numbers of a row depend on the rows before it.
        whole = self.available() is not None or self.call.numbers is not None
        rows = None if whole else _row_index(index, self.ndim)
        if rows is None:
            return self.materialize()[_plain(index)]
        return self._rows(self.hidden[rows])

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

    def _write(self, name: str, operand: Any) -> "LazyLogits":
        self._writable(f"__{name}__")
        getattr(self.materialize(), f"__{name}__")(_plain(operand))
        return self

    def _writable(self, what: str) -> None:
        """Compute the logits to write to them within the model's forward; later, nobody would see the change."""
        if self.view_of_another or not self.call.open:
            raise LogitsError(
                f"logits: {what} must not change logits that are computed on demand, since it would act on a "
                "temporary; take a copy with logits.clone(), or call the model with keep_logits=True"
            )
        self.call.changed = True
        # Written logits have a gradient even if gradients are disabled for the writing.
        with torch.set_grad_enabled(not self.constant):
            self.materialize(keep=True)
            self.call.repeats = False

    def _unwatched(self, what: str) -> None:
        if self.call.used:
            raise LogitsError(
                f"logits: {what} would miss the gradient of the loss, since the loss is computed without them, got "
                "logits of a step with labels; call the model without labels and compute the loss from outputs.logits"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.detach().cpu().__array__(*args, **options)

    __hash__ = object.__hash__


DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
for _name, _dtype in DTYPES.items():
    setattr(LazyLogits, _name, lambda self, dtype=_dtype: self.to(dtype))


def _operator(name: str) -> Any:
    def apply(self: LazyLogits, *others: Any) -> Any:
        return getattr(self.materialize(), name)(*map(_plain, others))

    apply.__name__ = name
    return apply


OPERATORS = (
    "sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs invert "
    "eq ne lt le gt ge and rand or ror xor rxor float int bool iter contains"
)
for _name in OPERATORS.split():
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))
# Without these, Python would bind the name to new logits, and the write would be lost.
for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(LazyLogits, f"__{_name}__", partialmethod(LazyLogits._write, _name))


def _saves_elsewhere() -> bool:
    """Return whether hooks replace the tensors that autograd saves, as activation checkpointing does."""
    return not torch.compiler.is_compiling() and saved_tensors_hooks(True) is not None


def _plain(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.materialize()
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _keeps_classes(sizes: Any, shape: torch.Size) -> bool:
    """Return whether the sizes only regroup rows, with the whole vocabulary as the last dimension."""
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return False
    rows = 1
    for size in sizes[:-1]:
        rows *= size
    count = shape.numel() // shape[-1]
    if sizes[-1] == -1:
        return -1 not in sizes[:-1] and rows == count
    return sizes[-1] == shape[-1] and (rows == count or -1 in sizes[:-1])


def _row_index(index: Any, dimensions: int) -> tuple[Any, ...] | None:
    """Return the index for hidden if it selects rows by numbers and slices, and the whole vocabulary; else None."""
    items = index if isinstance(index, tuple) else (index,)
    if any((item is not Ellipsis and not isinstance(item, (int, slice))) or isinstance(item, bool) for item in items):
        return None
    if Ellipsis in items:
        position = items.index(Ellipsis)
        items = (*items[:position], *[slice(None)] * (dimensions - len(items) + 1), *items[position + 1 :])
    if len(items) > dimensions or Ellipsis in items:
        return None
    if len(items) == dimensions:
        last = items[-1]
        if not isinstance(last, slice) or last != slice(None):
            return None
        items = items[:-1]
    return items
