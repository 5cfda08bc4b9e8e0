# SPDX-License-Identifier: Apache-2.0
"""The derivative of kernels for autograd and torch.compile: written once, so no op writes an autograd function."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_core.errors import GradientError, nearest
from liger_core.kernels import Kernel, define, library_of
from liger_core.private_torch import is_exporting, is_legacy_batched
from liger_core.schema import Field, Schema

# An attribute of a tensor: a function that makes it again.
_AGAIN = "liger_make_again"
# Forward kernel and number of its public outputs → its backward kernel, and the custom op that stands for both.
_DERIVATIVES: dict[tuple[Kernel, int], tuple[Kernel, Any]] = {}


def made_again(make: Callable[[], Tensor]) -> Tensor:
    """Return the tensor that `make` returns; backward passes do not keep it but call `make` again.

    For arguments without a gradient, such as frozen weights that are dequantized for each use.
    """
    tensor = make()
    setattr(tensor, _AGAIN, make)
    return tensor


def differentiable(
    forward: Kernel, backward: Kernel, saves: Sequence[str], public: int = 1, keep_first: bool = False
) -> Callable[..., Any]:
    """Return one differentiable function of two kernels, whose parameters are bound by name.

    forward   its first `public` outputs are returned. If it computes gradients itself, or saves what they need, it has
              `needs` as its last input, like backward
    backward  takes `grad_<output>` of public outputs, then saved tensors and options of forward under their own names,
              and last `needs: list[bool]`, which says which of its results are wanted. Its results are `grad_<input>`;
              `grad_<input>_and_<input>` is the gradient of both, which autograd copies before it writes to it. A last
              result `scratch` is workspace, not a gradient
    saves     the tensors among the inputs and outputs of forward that backward takes

    Public outputs without a `grad_` input are constants. With `keep_first`, tensors are saved before forward is
    launched, so none of them can be an output. Activation checkpointing recomputes a layer up to what is saved last, so
    it does not launch the last forward of a layer again.

    Raises TypeError, at import, if the names do not fit both schemas.
    """
    derivative = _Derivative(forward, backward, saves, public)
    if keep_first and (derivative.early or public != 1 or not derivative.inputs.issuperset(saves)):
        raise TypeError(
            f"{forward.name}: keep_first needs one output and a backward that saves inputs only, got {', '.join(saves)}"
        )
    node = _node(derivative, keep_first)

    def save_first(*args: Any) -> Any:
        saved = Kept.apply(*_kept([args[i] for i in derivative.saved]))  # type: ignore[no-untyped-call]
        return node.apply(saved, *args)

    return _call(derivative, save_first if keep_first else node.apply)


class _Derivative:
    """The positions of the values that two kernels exchange, looked up once by their names.

    early      whether forward takes `needs`
    targets    for each gradient that backward computes, the first and the last input that gets it; they differ only if
               it is shared
    upstream   the public outputs whose gradients backward takes
    saved      the tensors that autograd saves, among inputs and outputs of forward
    options    the options of forward that backward takes
    order      for each argument of backward, its position in (*upstream gradients, *saved, *options)
    """

    def __init__(self, forward: Kernel, backward: Kernel, saves: Sequence[str], public: int) -> None:
        _check_names(forward, backward, saves, public)
        self.forward, self.backward, self.public = forward, backward, public
        inputs, outputs = _names(forward.schema.arguments), _names(forward.schema.returns)
        position = {name: i for i, name in enumerate([*inputs, *outputs])}
        wanted = _names(backward.schema.arguments)[:-1]
        gradients = [name for name in wanted if name in _upstream(forward, public)]
        options = [name for name in wanted if name not in gradients and name not in saves]
        self.inputs = set(inputs)
        self.early = inputs[-1] == "needs"
        self.targets = [(position[names[0]], position[names[-1]]) for names in map(_inputs_of, _results(backward))]
        self.upstream = [outputs.index(name.removeprefix("grad_")) for name in gradients]
        self.saved, self.options = [position[name] for name in saves], [position[name] for name in options]
        values = {name: i for i, name in enumerate([*gradients, *saves, *options])}
        self.order = [values[name] for name in wanted]


def _node(derivative: _Derivative, keep_first: bool) -> Any:
    """Return the autograd function; with keep_first, its first input is the empty tensor of a node that saves."""
    forward, backward, public, early = derivative.forward, derivative.backward, derivative.public, derivative.early
    targets, upstream, saved = derivative.targets, derivative.upstream, derivative.saved
    options, order = derivative.options, derivative.order
    constants = [i for i in range(public) if i not in upstream]
    extra = int(keep_first)
    nothing = (None,) * (extra + len(derivative.inputs))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            # grad_fn is also None if no saved tensor requires a gradient, for instance if only the bias does.
            ctx.before, args = (args[0].grad_fn, args[1:]) if keep_first else (None, args)
            required = ctx.needs_input_grad[extra:]
            ctx.needs = [required[first] or required[last] for first, last in targets]
            if early:
                # An exported program may have been traced with other needs.
                args = (*args[:-1], ctx.needs)
            results = forward(*args)
            values = (*args, *results)
            ctx.again = [_maker(values[i]) for i in saved]
            if ctx.before is None:
                ctx.save_for_backward(*_kept([values[i] for i in saved]))
            ctx.options = [values[i] for i in options]
            ctx.set_materialize_grads(False)
            if constants:
                ctx.mark_non_differentiable(*[results[i] for i in constants if results[i] is not None])
            return results[0] if public == 1 else tuple(results[:public])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            check_backward(forward.name, *grads)
            for i in upstream:
                if grads[i] is not None:
                    break
            else:
                return nothing
            from_node = ctx.saved_tensors if ctx.before is None else ctx.before.saved_tensors
            tensors = [tensor if again is None else again() for tensor, again in zip(from_node, ctx.again, strict=True)]
            values = (*[grads[i] for i in upstream], *tensors, *ctx.options)
            results = backward(*[values[i] for i in order], ctx.needs)
            answer: list[Any] = list(nothing)
            for (first, last), result in zip(targets, results, strict=False):
                answer[extra + first] = answer[extra + last] = result
            if keep_first:
                # Passing an existing gradient makes autograd run this node on the device's thread.
                answer[0] = grads[0].new_empty(0)
            return tuple(answer)

    return Function


def _maker(value: Any) -> Callable[[], Tensor] | None:
    return getattr(value, _AGAIN, None)


def _kept(values: Iterable[Any]) -> list[Any]:
    """Return the values that autograd keeps: None in place of tensors that are made again."""
    return [value if _maker(value) is None else None for value in values]


def _call(derivative: _Derivative, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that callers get, which bypasses autograd if no gradient is required."""
    forward, public, early, targets = derivative.forward, derivative.public, derivative.early, derivative.targets
    traced = _custom_op(derivative, function)
    trained = sorted({i for pair in targets for i in pair})
    no = [False] * len(targets)
    groups = forward.groups
    name = forward.name.split("::")[1]

    def call(*args: Any) -> Any:
        if groups is not None:
            args = _flat(groups, args)
        forward.check_plain(args, name)
        required = False
        if torch.is_grad_enabled():
            for i in trained:
                if args[i] is not None and args[i].requires_grad:
                    required = True
                    break
            else:
                # Later inputs of an exported program may require gradients.
                required = is_exporting()
        if early:
            needs = [_requires(args[first]) or _requires(args[last]) for first, last in targets] if required else no
            args = (*args, needs)
        if required:
            return traced(*args) if torch.compiler.is_compiling() else function(*args)
        results = forward(*args)
        return results[0] if public == 1 else tuple(results[:public])

    call.__name__ = call.__qualname__ = name
    return call


def _flat(groups: list[tuple[Any, int]], values: Iterable[Any]) -> tuple[Any, ...]:
    """Flatten parameters into the values that custom ops and autograd take."""
    flat: list[Any] = []
    for (make, _), value in zip(groups, values, strict=False):
        if make is None:
            flat.append(value)
        else:
            flat.extend(value)
    return tuple(flat)


def _requires(value: Tensor | None) -> bool:
    return value is not None and value.requires_grad


def _custom_op(derivative: _Derivative, function: Callable[..., Any]) -> Any:
    """Return the custom op that stands for a differentiable function in a compiled region.

    Dynamo would trace an autograd function into its own graph, whose nodes torch 2.11 does not mark for the surrounding
    checkpoint, so their results would be saved (tests/conformance/test_tracing.py). A custom op becomes one node, which
    has the mark. Under it, AOTAutograd finds the two kernels, so a compiled graph calls these directly, without
    autograd.
    """
    forward, backward, public = derivative.forward, derivative.backward, derivative.public
    if (forward, public) not in _DERIVATIVES:

        def plainly(*args: Any) -> Any:
            outputs = forward(*args)
            return outputs[0] if public == 1 else tuple(outputs[:public])

        namespace, name = forward.name.split("::")
        name, library = f"{name}_differentiable_{public}", library_of(namespace)
        op = define(library, name, Schema(forward.schema.arguments, forward.schema.returns[:public]), plainly)
        library.impl(name, lambda *args: function(*args) if torch.is_grad_enabled() else plainly(*args), "Autograd")
        library.impl(name, plainly, "CompositeExplicitAutograd")
        _DERIVATIVES[forward, public] = backward, op
    known, op = _DERIVATIVES[forward, public]
    if known is not backward:
        raise TypeError(f"{forward.name}: it must have one derivative, got {known.name} and {backward.name}")
    return op


def check_backward(title: str, *grads: Tensor | None) -> None:
    """Raise GradientError if the results of a kernel's backward pass would be differentiated again, or batched.

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
                "vectorize=True); take one at a time"
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


def _check_names(forward: Kernel, backward: Kernel, saves: Sequence[str], public: int) -> None:
    """Check that every parameter of backward is one of forward, and that `saves` are its tensors."""
    inputs, outputs = _names(forward.schema.arguments), _names(forward.schema.returns)
    gradients = _upstream(forward, public)
    *wanted, last = backward.schema.arguments
    if last != ("needs", "bool[]"):
        raise TypeError(f"{backward.name}: its last input must be needs: list[bool], got {last.type} {last.name}")
    allowed = [*gradients, *inputs, *outputs]
    for name in _names(wanted):
        if name not in allowed:
            raise TypeError(
                f"{backward.name}: its inputs must be gradients of public outputs, inputs and outputs of "
                f"{forward.name} ({', '.join(allowed)}) and needs, got {name}.{nearest(name, allowed)}"
            )
    first = [field.name for field in wanted if field.name in gradients]
    if not first or _names(wanted)[: len(first)] != [name for name in gradients if name in first]:
        raise TypeError(
            f"{backward.name}: {', '.join(gradients)} must come first and in this order, got "
            f"{', '.join(_names(wanted))}"
        )
    tensors = [field.name for field in wanted if field.type.startswith("Tensor") and field.name not in gradients]
    if sorted(saves) != sorted(tensors):
        raise TypeError(
            f"{backward.name}: saves must name the tensors that it takes besides gradients ({', '.join(tensors)}), got "
            f"{', '.join(saves) or 'none'}"
        )
    for result in _results(backward):
        for name in _inputs_of(result):
            if name not in inputs:
                raise TypeError(
                    f"{backward.name}: its results must be grad_<input of {forward.name}> ({', '.join(inputs)}), got "
                    f"{result}.{nearest(result.removeprefix('grad_'), inputs)}"
                )


def _names(fields: Iterable[Field]) -> list[str]:
    return [field.name for field in fields]


def _upstream(forward: Kernel, public: int) -> list[str]:
    """Return the names of the gradients of the public outputs."""
    return [f"grad_{field.name}" for field in forward.schema.returns[:public]]


def _results(backward: Kernel) -> list[str]:
    """Return the results of a backward kernel that are gradients."""
    *rest, last = _names(backward.schema.returns)
    return rest if last == "scratch" else [*rest, last]


def _inputs_of(result: str) -> list[str]:
    """Return the inputs whose gradient a result of a backward kernel is."""
    return result.removeprefix("grad_").split("_and_")
