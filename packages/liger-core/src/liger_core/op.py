# SPDX-License-Identifier: Apache-2.0
"""The op: one description from which dispatch, tests, benchmark and documentation are generated; and its dtypes."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch

from liger_core import checks
from liger_core.errors import LigerError, Unsupported, nearest
from liger_core.layout import Layout, run_locally
from liger_core.private_torch import constant_when_traced

# The options that let an op overwrite tensors that it was given.
OVERWRITING = ("inplace", "overwrite", "main_grad")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Sample:
    """One call that an implementation must get right, and the code path it is for.

    `frozen` names floating-point arguments that get no gradient. `stops` means that the op's gradient deliberately
    differs from the derivative of its outputs (`padding_idx`), so gradcheck skips the sample. A clamp does not need it.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    frozen: tuple[str, ...] = ()
    stops: bool = False


@dataclass(frozen=True)
class Misuse:
    """One wrong call with the exact error and message that it must raise."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    error: type[LigerError]
    message: str


@dataclass(frozen=True)
class Workload:
    """One benchmark shape: `make(device, dtype)` gives (args, kwargs). `quick` ones run on a laptop CPU.

    frozen  tensor arguments that get no gradient although they are floating point
    axis    the size that a series of workloads varies and its value here, ("N", 4096); such a workload belongs to the
            scaling benchmark only
    """

    name: str
    make: Callable[[torch.device, torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]]
    quick: bool = False
    frozen: tuple[str, ...] = ()
    axis: tuple[str, int] | None = None


class Product(NamedTuple):
    """A matmul (rows, inner) @ (inner, columns) that a call cannot avoid.

    transposed  which operand lies in memory transposed: "", "left" or "right"
    gradient    the argument whose gradient alone needs it, if there is one
    """

    rows: int
    inner: int
    columns: int
    transposed: str = ""
    gradient: str = ""


@dataclass(frozen=True)
class Work:
    """The least that a call must do: bytes to move through device memory and floating-point operations to run.

    `forward_*` is one forward without gradients, `full_*` is forward and backward. Products, where there are any, count
    for the measured time of exactly these matmuls instead of the operations.
    """

    forward_bytes: int
    full_bytes: int
    forward_flops: int = 0
    full_flops: int = 0
    forward_products: tuple[Product, ...] = ()
    full_products: tuple[Product, ...] = ()


class Dtypes(NamedTuple):
    """Groups of tensor arguments, by name; all arguments in a group must have the same dtype.

    Outside autocast, nothing is cast silently. Under autocast, each group is promoted to the widest dtype in it, as
    torch promotes x + residual, or, with `matmul`, cast to the dtype of autocast, as for torch.nn.functional.linear.
    """

    alike: tuple[tuple[str, ...], ...]
    matmul: bool = False


# Every tensor may have its own dtype.
ANY = Dtypes(())


@dataclass(slots=True)
class Choice:
    """The functions that calls of an op run.

    They are one object: a new selection replaces all of them at once, also for calls in other threads.

    table      device type → implementation
    traced     device type → implementation in a compiled region
    otherwise  the implementation for all other device types
    declined   called with the Unsupported that an implementation raised, and the arguments of the call
    """

    table: Mapping[str, Callable[..., Any]]
    traced: Mapping[str, Callable[..., Any]]
    otherwise: Callable[..., Any]
    declined: Callable[..., Any]


class Op(Generic[P, R]):
    """A function of tensors and plain scalars; calling it checks the arguments, then runs the selected implementation.

    `reference` is the definition: pure PyTorch, any device. `choice` is set by the selection; it is a plain attribute,
    so that Dynamo guards what a call reads of it and a new selection recompiles.
    """

    def __init__(
        self, reference: Callable[P, R], *, check: Callable[..., None],
        samples: Callable[[torch.device, torch.dtype], Iterator[Sample]],
        misuses: Callable[[torch.device], Iterator[Misuse]], workloads: Callable[[], Iterable[Workload]],
        work: Callable[..., Work], layout: Layout | Callable[..., Layout] | None = None, dtypes: Dtypes = ANY,
    ) -> None:  # fmt: skip
        self.reference = reference
        self.check = check
        self.samples = samples
        self.misuses = misuses
        self.workloads = workloads
        self.work = work
        # The dimensions that may be sharded, or a function of the arguments that returns them; None refuses DTensors.
        self.layout = layout
        self.dtypes = dtypes
        self.name = reference.__name__
        self.signature = inspect.signature(reference)
        self.first = next(iter(self.signature.parameters))
        self.same_dtypes = _same_dtypes(dtypes, tuple(self.signature.parameters)) if dtypes.alike else None
        self.choice: Choice | None = None
        # Used by an op that no plugin registers, which the selection does not know.
        self.alone = Choice({}, {}, reference, _raise)
        # The checker has the signature of the reference, so that a wrong keyword is reported under the op's own name.
        check.__name__ = check.__qualname__ = self.name
        self.__name__ = self.name
        self.__qualname__ = self.name
        self.__module__ = reference.__module__
        self.__doc__ = reference.__doc__
        self.__signature__ = self.signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        compiling = torch.compiler.is_compiling()
        # `compiling` comes first: tracing would keep the value of an attribute that it has read.
        if compiling or self.choice is None:
            _settle()
        try:
            args, kwargs = self.checked(args, kwargs)
            choice: Any = self.choice or self.alone
            first: Any = args[0] if args else kwargs[self.first]
            if self.layout is not None and type(first) not in _PLAIN and hasattr(first, "device_mesh"):
                return self._on_ranks(self.layout, args, kwargs)
            table = choice.traced if compiling else choice.table
            # device.type takes five times as long as is_cuda.
            implementation = table.get("cuda" if first.is_cuda else first.device.type, choice.otherwise)
            try:
                return implementation(*args, **kwargs)  # type: ignore[no-any-return]
            except Unsupported as reason:
                refused = reason
            except (NotImplementedError, RuntimeError) as problem:
                checks.not_plain(self.name, self.signature.bind(*args, **kwargs).arguments, problem)
                raise
            return choice.declined(refused, *args, **kwargs)  # type: ignore[no-any-return]
        except TypeError:
            self._check_names(kwargs)
            raise

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise a TypeError that names the op if it does not have one of the arguments.

        This runs only after a TypeError, so valid calls pay nothing. Checks may pass options on to the implementation,
        whose own name would not help the caller.
        """
        for name in names:
            if name not in self.signature.parameters:
                known = self.signature.parameters
                raise TypeError(
                    f"{self.name}: arguments must be among {', '.join(known)}, got {name!r}.{nearest(name, known)}"
                ) from None

    def checked(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a call, cast as under autocast, or raise the error that the call would raise."""
        self.check(*args, **kwargs)
        if self.same_dtypes is None or self.same_dtypes(args, kwargs):
            return args, kwargs
        return (), _settled(self.name, self.dtypes, self.signature.bind(*args, **kwargs).arguments)

    def _on_ranks(self, layout: Layout | Callable[..., Layout], args: Any, kwargs: Any) -> R:
        """Run the op on the local tensors of DTensors, never in place: their memory does not belong to this call."""
        arguments = self.signature.bind(*args, **kwargs).arguments
        out_of_place = {name: False if name in OVERWRITING else value for name, value in arguments.items()}
        layout = layout if isinstance(layout, Layout) else layout(**out_of_place)
        return run_locally(self.name, layout, self, out_of_place)  # type: ignore[no-any-return]

    def __reduce__(self) -> str:
        """Return the op's name: like a function, an op is pickled by name and copied as itself."""
        return self.name

    def __repr__(self) -> str:
        return f"<op {self.name}{self.signature}>"


def _raise(reason: Unsupported, *args: Any, **kwargs: Any) -> NoReturn:
    raise reason


def _same_dtypes(dtypes: Dtypes, parameters: tuple[str, ...]) -> Callable[[tuple[Any, ...], Mapping[str, Any]], bool]:
    """Return a function of a call's arguments that says whether their dtypes match and `_settled` can be skipped.

    It runs in every call.
    """
    groups = tuple(tuple((parameters.index(name), name) for name in group) for group in dtypes.alike)

    def same(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        for group in groups:
            first = None
            for i, name in group:
                value = args[i] if i < len(args) else kwargs.get(name)
                if value is None:
                    continue
                if first is None:
                    first = value
                    if dtypes.matmul and autocast_dtype(value.device.type) is not None:
                        return False
                elif value.dtype != first.dtype:
                    return False
        return True

    return same


def _settled(op: str, dtypes: Dtypes, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in the dtypes that the op takes.

    Raises DtypeError if the dtypes in a group differ and autocast does not cast them.
    """
    result = dict(arguments)
    for group in dtypes.alike:
        tensors: dict[str, torch.Tensor] = {name: arguments[name] for name in group if arguments.get(name) is not None}
        if not tensors:
            continue
        first, *others = tensors
        tensor_dtypes = {value.dtype for value in tensors.values()}
        low = autocast_dtype(tensors[first].device.type)
        # An in-place op must write to the caller's tensor, not to a copy in another dtype.
        if low is None or arguments.get("inplace") or (dtypes.matmul and torch.float64 in tensor_dtypes):
            checks.same_dtype(op, first, tensors[first], **{name: tensors[name] for name in others})
            continue
        dtype = low if dtypes.matmul else reduce(torch.promote_types, tensor_dtypes)
        result |= {name: value.to(dtype) for name, value in tensors.items()}
    return result


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the autocast dtype for this device type, or None if autocast is off."""
    # Meta tensors have no autocast, and torch.compile of PyTorch 2.11 cannot trace the query.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# The selection's `settle`, which makes every op ready for its first call.
_prepare: list[Callable[[], None]] = []


def before_first_call(prepare: Callable[[], None]) -> None:
    """Set a function to run before the first call. Higher layers pass it in, because ops do not import them."""
    _prepare[:] = [prepare]


@constant_when_traced
def _settle() -> bool:
    for prepare in _prepare:
        prepare()
    return True


def op(
    *, check: Callable[..., None], samples: Callable[[torch.device, torch.dtype], Iterator[Sample]],
    misuses: Callable[[torch.device], Iterator[Misuse]], workloads: Callable[[], Iterable[Workload]],
    work: Callable[..., Work], layout: Layout | Callable[..., Layout] | None = None, dtypes: Dtypes = ANY,
) -> Callable[[Callable[P, R]], Op[P, R]]:  # fmt: skip
    """Turn a pure-PyTorch reference into an `Op`."""
    return lambda reference: Op(
        reference, check=check, samples=samples, misuses=misuses, workloads=workloads, work=work, layout=layout,
        dtypes=dtypes,
    )  # fmt: skip
