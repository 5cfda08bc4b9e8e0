# SPDX-License-Identifier: Apache-2.0
"""How a backend's kernels work with autograd, torch.compile and eager Python: written once, for every op.

A `Kernel` is a custom op made of `allocate` (its outputs, and so also its fake) and `launch` (fills them). Plain eager
calls skip the dispatcher, which costs more than a small kernel; whatever traces or watches (compile, a dispatch mode, a
tensor subclass) gets the custom op. `differentiable` ties a forward and a backward kernel together by the names of
their parameters, so no op writes an autograd function of its own; a compiled region gets it as one node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from liger_core.errors import GradientError, Unsupported, nearest
from liger_core.private_torch import (
    DisableAutocast,
    autocast_is_on,
    dispatch_stack_length,
    graph_task,
    is_exporting,
    is_legacy_batched,
    is_transforming,
    is_wrapped,
    keeps_graph,
    parse_schema,
)

_libraries: dict[str, torch.library.Library] = {}
# Custom op → its kernel, for code that watches operations.
KERNELS: dict[Any, Kernel] = {}
_PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, list, tuple})
# The annotations that parameters of `launch` may have, and the schema type of each.
_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "int",
    float: "float",
    float | None: "float?",
    str: "str",
    str | None: "str?",
    torch.dtype | None: "ScalarType?",
    list[bool]: "bool[]",
    list[float]: "float[]",
}

Outputs = tuple[Tensor | None, ...]


class Kernel:
    """A custom op `namespace::name` made of `allocate(*inputs) -> outputs` and `launch(*outputs, *inputs)`.

    launch    its signature is the schema: outputs before the slash, `def launch(y, /, x, weight, eps)`, inputs behind
              it. A parameter that is annotated with a NamedTuple stands for all of its fields
    allocate  returns a tuple with new memory for every output, None for an optional one that is not wanted
    recycle   like allocate, but may hand out the inputs themselves: for a backward whose graph is freed behind it
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        allocate: Callable[..., Outputs],
        launch: Callable[..., None],
        recycle: Callable[..., Outputs] | None = None,
    ) -> None:
        self.name = f"{namespace}::{name}"
        self.allocate, self.launch, self.recycle = allocate, launch, recycle
        outputs, inputs = _parameters(self.name, launch)
        self.groups, self.output_groups = _groups(inputs), _groups(outputs)
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        library = _libraries[namespace]
        self.declared = _fields(self.name, inputs), _fields(self.name, outputs)
        self.schema = _define(library, name, *self.declared)
        library.impl(name, self._dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(self.name, self._fake, lib=library)
        self.op = getattr(getattr(torch.ops, namespace), name).default
        KERNELS[self.op] = self
        self.count = len(self.schema.returns)
        self.single = self.count == 1
        # Number of public outputs → the backward kernel, and the custom op that is tied to it.
        self.tied: dict[int, tuple[Kernel, Any]] = {}

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
        # Not if the pass keeps its graph (retain_graph=True): another one may need what was saved.
        if self.recycle is not None and graph_task() != -1 and not keeps_graph():
            return self.execute(args, self.recycle)
        return self.execute(args, self.allocate)

    def tie(self, backward: Kernel, public: int, function: Callable[..., Any]) -> Any:
        """The custom op that stands for a differentiable function of this kernel, with its first outputs, in a compiled
        region.

        Dynamo would trace an autograd function into its own graph, whose nodes torch 2.11 does not mark for the
        surrounding checkpoint, so their results would be saved (tests/conformance/test_tracing.py). A custom op becomes
        one node, which has the mark. Under it, AOTAutograd finds the two kernels, so a compiled graph calls these
        directly, without autograd.
        """
        if public not in self.tied:
            library, (space, name) = _libraries[self.op.namespace], self.name.split("::")
            name = f"{name}_differentiable_{public}"
            _define(library, name, self.declared[0], self.declared[1][:public])

            def plainly(*args: Any) -> Any:
                outputs = self(*args)
                return outputs[0] if public == 1 else tuple(outputs[:public])

            library.impl(name, lambda *args: function(*args) if torch.is_grad_enabled() else plainly(*args), "Autograd")
            library.impl(name, plainly, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{space}::{name}", plainly, lib=library)
            self.tied[public] = backward, getattr(getattr(torch.ops, space), name).default
        known, op = self.tied[public]
        if known is not backward:
            raise TypeError(f"{self.name}: it must have one derivative, got {known.name} and {backward.name}")
        return op

    def execute(self, args: tuple[Any, ...], allocate: Callable[..., Outputs]) -> Outputs:
        """Allocate and launch; backends override this to put a device guard around it."""
        args = self.grouped(args)
        outputs = allocate(*args)
        if not isinstance(outputs, tuple) or len(outputs) != self.count:
            self._refuse_outputs(outputs)
        self.launch(*(outputs if self.output_groups is None else _grouped(self.output_groups, outputs)), *args)
        return outputs

    def grouped(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The flat arguments of the custom op as allocate, recycle and launch take them."""
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
        """torch.func and forward-mode AD need plain PyTorch, and most references are plain PyTorch."""
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
            "forward-mode AD; "
            "write this part in plain PyTorch"
        )


def reference_kernel(
    name: str,
    allocate: Callable[..., Outputs],
    launch: Callable[..., None],
    recycle: Callable[..., Outputs] | None = None,
) -> Kernel:
    """A kernel of the pure-PyTorch references."""
    return _ReferenceKernel("liger_reference", name, allocate, launch, recycle)


# -- schemas

# Names and types of parameters.
_Parameters = list[tuple[str, Any]]
# For each parameter its NamedTuple, if it is one, and the number of fields it stands for; None if there is no
# NamedTuple.
_Groups = list[tuple[Any, int]] | None


def _parameters(kernel: str, launch: Callable[..., None]) -> tuple[_Parameters, _Parameters]:
    """The outputs and the inputs in the signature of launch."""
    types, found = get_type_hints(launch), inspect.signature(launch).parameters.values()
    outputs = [(p.name, types.get(p.name)) for p in found if p.kind is p.POSITIONAL_ONLY]
    inputs = [(p.name, types.get(p.name)) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not outputs or len(outputs) + len(inputs) != len(found):
        raise TypeError(
            f"{kernel}: launch must take outputs, a slash and inputs, (y, /, x, weight), got "
            f"{inspect.signature(launch)}"
        )
    return outputs, inputs


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _groups(parameters: _Parameters) -> _Groups:
    if not any(_is_group(kind) for _, kind in parameters):
        return None
    return [(kind._make, len(kind._fields)) if _is_group(kind) else (None, 1) for _, kind in parameters]


def _grouped(groups: list[tuple[Any, int]], values: Sequence[Any]) -> tuple[Any, ...]:
    """Group flat values into the parameters whose fields they are."""
    grouped, start = [], 0
    for make, count in groups:
        grouped.append(values[start] if make is None else make(values[start : start + count]))
        start += count
    return tuple(grouped)


def _flat(groups: list[tuple[Any, int]], values: Iterable[Any]) -> tuple[Any, ...]:
    """Flatten parameters into the values that custom ops and autograd take."""
    flat: list[Any] = []
    for (make, _), value in zip(groups, values, strict=False):
        if make is None:
            flat.append(value)
        else:
            flat.extend(value)
    return tuple(flat)


def _fields(kernel: str, parameters: _Parameters) -> list[str]:
    """Parameters in the notation of a schema."""
    flat: _Parameters = []
    for name, kind in parameters:
        flat.extend(get_type_hints(kind).items() if _is_group(kind) else [(name, kind)])
    for name, kind in flat:
        if kind not in _TYPES:
            known = ", ".join(getattr(t, "__name__", str(t)) for t in _TYPES)
            raise TypeError(
                f"{kernel}: {name} must be annotated with one of {known} or a NamedTuple of these, got {kind}"
            )
    return [f"{_TYPES[kind]} {name}" for name, kind in flat]


def _define(library: torch.library.Library, name: str, inputs: list[str], outputs: list[str]) -> Any:
    schema = f"{name}({', '.join(inputs)}) -> ({', '.join(outputs)})"
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return parse_schema(schema)


# -- autograd


def differentiable(forward: Kernel, backward: Kernel, public: int = 1, keep_first: bool = False) -> Callable[..., Any]:
    """One differentiable function of two kernels, bound by the names of their parameters.

    backward's inputs are `grad_<output>`, inputs and outputs of forward under their own names (these are kept until
    then), and last `needs: list[bool]`: which of its results, each called `grad_<input>`, are asked for. A result
    `grad_<input>_and_<input>` is the gradient of both; autograd copies a gradient that it shares before it writes to
    it. A last result called `scratch` is memory that the launch works in, and nobody's gradient. A forward that
    computes gradients itself, or saves what they need, has the same `needs` last. The first `public` outputs are
    returned; those without a `grad_` input are constants.

    With `keep_first`, what backward needs is saved before the forward is launched, which requires that none of it is an
    output of forward. Activation checkpointing recomputes a layer up to what is saved last, so it does not launch the
    last forward of a layer again.

    Raises TypeError, at import, if a name belongs to nothing.
    """
    inputs = [a.name for a in forward.schema.arguments]
    outputs = [r.name for r in forward.schema.returns]
    early = inputs[-1] == "needs"
    wanted = [a.name for a in backward.schema.arguments]
    _check_names(forward, backward, public)
    # The first and the last input of each of backward's results; they differ only for a shared gradient.
    targets = [(inputs.index(names[0]), inputs.index(names[-1])) for names in map(_inputs_of, _results(backward))]
    trained = sorted({i for pair in targets for i in pair})
    gradients = [
        outputs.index(n.removeprefix("grad_"))
        for n in wanted
        if n.startswith("grad_") and n.removeprefix("grad_") in outputs
    ]
    rest = wanted[len(gradients) : -1]
    # Autograd saves tensors, the context saves options; order is the position of each in the concatenation of the two.
    tensors = {a.name for a in forward.schema.arguments if "Tensor" in str(a.type)} | set(outputs)
    names = [*inputs, *outputs]
    kept = [names.index(n) for n in rest if n in tensors]
    options = [names.index(n) for n in rest if n not in tensors]
    order = [[*kept, *options].index(names.index(n)) for n in rest]
    constants = [i for i in range(public) if i not in gradients]
    count = len(inputs)
    if keep_first and (early or public != 1 or any(i >= count for i in kept)):
        raise TypeError(
            f"{forward.name}: keep_first needs one output and a backward that takes inputs only, got {', '.join(rest)}"
        )
    title = forward.name
    name = title.split("::")[1]

    # With keep_first, an empty tensor comes before the inputs, whose node has saved what is kept.
    extra = int(keep_first)

    def keep(ctx: Any, args: tuple[Any, ...], results: Outputs) -> None:
        values = (*args, *results)
        if ctx.before is None:
            ctx.save_for_backward(*[values[i] for i in kept])
        ctx.options = [args[i] for i in options]
        ctx.set_materialize_grads(False)
        if constants:
            ctx.mark_non_differentiable(*[results[i] for i in constants if results[i] is not None])

    def derive(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        check_backward(title, *grads)
        for i in gradients:
            if grads[i] is not None:
                break
        else:
            return (None,) * (extra + count)
        saved = (ctx if ctx.before is None else ctx.before).saved_tensors
        values = (*saved, *ctx.options)
        results = backward(*[grads[i] for i in gradients], *[values[i] for i in order], ctx.needs)
        answer: list[Any] = [None] * (extra + count)
        for (first, last), result in zip(targets, results, strict=False):
            answer[extra + first] = answer[extra + last] = result
        if keep_first:
            # A gradient that is there keeps the node on the thread of the device.
            answer[0] = grads[0].new_empty(0)
        return tuple(answer)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            # None too if nothing that is kept requires a gradient: the bias does, for instance.
            ctx.before, args = (args[0].grad_fn, args[1:]) if keep_first else (None, args)
            given = ctx.needs_input_grad[extra:]
            ctx.needs = [given[first] or given[last] for first, last in targets]
            if early:
                # Those of this run: an exported program may have been traced with others.
                args = (*args[:-1], ctx.needs)
            results = forward(*args)
            keep(ctx, args, results)
            return results[0] if public == 1 else tuple(results[:public])

        backward = staticmethod(derive)

    def apply(*args: Any) -> Any:
        first = [Kept.apply(*[args[i] for i in kept])] if keep_first else []  # type: ignore[no-untyped-call]
        return Function.apply(*first, *args)  # type: ignore[no-untyped-call]

    function = apply if keep_first else Function.apply
    traced = forward.tie(backward, public, function)
    no = [False] * len(targets)
    groups = forward.groups

    def call(*args: Any) -> Any:
        if groups is not None:
            args = _flat(groups, args)
        forward.check_plain(args, name)
        asked = False
        if torch.is_grad_enabled():
            for i in trained:
                if args[i] is not None and args[i].requires_grad:
                    asked = True
                    break
            else:
                # Later inputs of an exported program may require gradients.
                asked = is_exporting()
        if early:
            args = (*args, [_asks(args[first]) or _asks(args[last]) for first, last in targets] if asked else no)
        if asked:
            return traced(*args) if torch.compiler.is_compiling() else function(*args)
        results = forward(*args)
        return results[0] if public == 1 else tuple(results[:public])

    call.__name__ = call.__qualname__ = name
    return call


def check_backward(title: str, *grads: Tensor | None) -> None:
    """For a backward pass that PyTorch does not see into: raises GradientError where its results would be
    differentiated again, or batched.

    torch.autograd.function.once_differentiable marks results only if an upstream gradient requires a gradient: those of
    y.sum() would be constants. Batches of upstream gradients (is_grads_batched=True) are tensors without memory.
    """
    if torch.is_grad_enabled():
        raise GradientError(
            f"{title}: the gradient must not be differentiated again, got create_graph=True; write that part in plain "
            "PyTorch"
        )
    for grad in grads:
        if grad is not None and is_legacy_batched(grad):
            raise GradientError(
                f"{title}: upstream gradients must be plain tensors, got a batch of them (is_grads_batched=True, "
                "vectorize=True); "
                "take one at a time"
            )


class Kept(torch.autograd.Function):
    """A node that saves tensors for the node behind it, and returns an empty tensor that connects the two."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        first: Tensor = next(t for t in tensors if t is not None)
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def _check_names(forward: Kernel, backward: Kernel, public: int) -> None:
    """Every parameter of backward must belong to a parameter or output of forward."""
    inputs, outputs = [a.name for a in forward.schema.arguments], [r.name for r in forward.schema.returns]
    gradients = [f"grad_{name}" for name in outputs[:public]]
    *wanted, last = backward.schema.arguments
    if last.name != "needs" or str(last.type) != "List[bool]":
        raise TypeError(f"{backward.name}: its last input must be needs: list[bool], got {last.type} {last.name}")
    names = [a.name for a in wanted]
    for name in names:
        allowed = [*gradients, *inputs, *outputs]
        if name not in allowed:
            raise TypeError(
                f"{backward.name}: its inputs must be gradients of public outputs, inputs and outputs of "
                f"{forward.name} "
                f"({', '.join(allowed)}) and needs, got {name}.{nearest(name, allowed)}"
            )
    given = [name for name in names if name in gradients]
    if not given or names[: len(given)] != [name for name in gradients if name in given]:
        raise TypeError(
            f"{backward.name}: {', '.join(gradients)} must come first and in this order, got {', '.join(names)}"
        )
    for result in _results(backward):
        for name in _inputs_of(result):
            if name not in inputs:
                raise TypeError(
                    f"{backward.name}: its results must be grad_<input of {forward.name}> ({', '.join(inputs)}), got "
                    f"{result.name}."
                    f"{nearest(result.name.removeprefix('grad_'), inputs)}"
                )


def _is_transformed(value: Any) -> bool:
    """Whether a value is batched, differentiated by torch.func, or has a tangent."""
    if not isinstance(value, Tensor):
        return False
    return is_wrapped(value) or forward_ad.unpack_dual(value).tangent is not None


def _asks(value: Tensor | None) -> bool:
    return value is not None and value.requires_grad


def _results(backward: Kernel) -> list[Any]:
    """The results of a backward kernel that are gradients."""
    *rest, last = backward.schema.returns
    return rest if last.name == "scratch" else [*rest, last]


def _inputs_of(result: Any) -> list[str]:
    """The inputs whose gradient a result of a backward kernel is."""
    names: list[str] = result.name.removeprefix("grad_").split("_and_")
    return names
