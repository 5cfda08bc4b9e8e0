# SPDX-License-Identifier: Apache-2.0
"""How a backend's kernels meet autograd, torch.compile and eager Python: written once, for every op.

A `Kernel` is a custom op made of `allocate` (its outputs, and so also its fake) and `launch` (fills them). Plain eager calls
skip the dispatcher, which costs more than a small kernel; whatever traces or watches (compile, a dispatch mode, a tensor
subclass) gets the custom op. `differentiable` ties a forward and a backward kernel together by the names in their
schemas, so no op writes an autograd function of its own; a compiled region gets it as one node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from liger_core.errors import GradientError, Unsupported

_libraries: dict[str, torch.library.Library] = {}
# Custom op → the kernel that it is made of, for whoever watches operations.
KERNELS: dict[Any, Kernel] = {}
# Whether the backward pass that is running keeps its graph (retain_graph=True) and may so come back to what was saved.
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_transform = torch._C._functorch.peek_interpreter_stack
_PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, list, tuple})

Outputs = tuple[Tensor | None, ...]


class Kernel:
    """A custom op `namespace::name` made of `allocate(*args) -> outputs` and `launch(*outputs, *args)`.

    schema   as for `torch.library.define`; results must be named, optional ones are `Tensor?`
    recycle  like allocate, but may hand out the arguments themselves: for a backward whose graph is freed behind it
    """

    def __init__(
        self,
        namespace: str,
        schema: str,
        allocate: Callable[..., Outputs],
        launch: Callable[..., None],
        recycle: Callable[..., Outputs] | None = None,
    ) -> None:
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        library = _libraries[namespace]
        name = library.define(schema, tags=(torch.Tag.pt2_compliant_tag,)).split("(")[0].split("::")[-1]
        self.name = f"{namespace}::{name}"
        self.allocate, self.launch, self.recycle = allocate, launch, recycle
        library.impl(name, self._dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(self.name, self._fake, lib=library)
        self.op = getattr(getattr(torch.ops, namespace), name).default
        KERNELS[self.op] = self
        self.schema = self.op._schema
        self.single = len(self.schema.returns) == 1
        # Number of public outputs → the backward kernel, and the custom op that is tied to it.
        self.tied: dict[int, tuple[Kernel, Any]] = {}

    def __call__(self, *args: Any) -> Outputs:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or not _PLAIN.issuperset(map(type, args)):
            outputs = self.op(*args)
            return (outputs,) if self.single else outputs
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return self._plainly(args)
        return self._plainly(args)

    def _plainly(self, args: tuple[Any, ...]) -> Outputs:
        """Run past the dispatcher; in a backward that frees its graph with what it may recycle."""
        if self.recycle is not None and torch._C._current_graph_task_id() != -1 and not _keeps_graph():
            return self.execute(args, self.recycle)
        return self.execute(args, self.allocate)

    def tie(self, backward: Kernel, public: int, function: Callable[..., Any]) -> Any:
        """The custom op that stands for a differentiable function of this kernel, with its first outputs, in a compiled region.

        Dynamo would make a graph of its own of an autograd function, whose nodes torch 2.11 gives no mark of the checkpoint around
        them: their results were saved (tests/conformance/test_tracing.py). Of a custom op it makes one node, which has the mark.
        What AOTAutograd finds under it are the two kernels, so that a compiled graph calls these, past all autograd.
        """
        if public not in self.tied:
            library, (space, name) = _libraries[self.op.namespace], self.name.split("::")
            arguments, _, results = str(self.schema).partition("(")[2].rpartition(" -> ")
            kept = ", ".join(results.strip("()").split(", ")[:public])
            name = library.define(f"{name}_differentiable_{public}({arguments} -> ({kept})", tags=(torch.Tag.pt2_compliant_tag,))
            name = name.split("(")[0].split("::")[-1]

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
        outputs = allocate(*args)
        self.launch(*outputs, *args)
        return outputs

    def refuse_transform(self, op: str) -> NoReturn:
        """torch.func and forward-mode AD need plain PyTorch, which most references are."""
        raise Unsupported("torch.func transforms and forward-mode AD see plain PyTorch only")

    def _dispatched(self, *args: Any) -> Any:
        with torch._C._DisableAutocast():
            outputs = self.execute(args, self.allocate)
        return outputs[0] if self.single else outputs

    def _fake(self, *args: Any) -> Any:
        outputs = self.allocate(*args)
        return outputs[0] if self.single else outputs


def reference_kernel(
    schema: str, allocate: Callable[..., Outputs], launch: Callable[..., None], recycle: Callable[..., Outputs] | None = None
) -> Kernel:
    """A kernel of the pure-PyTorch references."""
    return _ReferenceKernel("liger_reference", schema, allocate, launch, recycle)


class _ReferenceKernel(Kernel):
    """A reference that is a kernel itself: there is nobody that it could hand a call to."""

    def refuse_transform(self, op: str) -> NoReturn:
        raise GradientError(
            f"{op}: the gradient must be taken by backward() or torch.autograd.grad, got a torch.func transform or forward-mode AD; "
            "write this part in plain PyTorch"
        )


def differentiable(forward: Kernel, backward: Kernel, public: int = 1) -> Callable[..., Any]:
    """One differentiable function of two kernels, bound by the names in their schemas.

    backward's arguments are `grad_<output>`, inputs and outputs of forward under their own names (these are kept until then),
    and last `bool[n] needs`: which of its results, each called `grad_<input>`, are asked for. A result `grad_<input>_and_<input>` is
    the gradient of both; autograd copies a gradient that it shares before it writes to it. A forward that computes gradients itself
    takes the same `needs` last. The first `public` outputs are returned; those without a `grad_` argument are constants.
    """
    inputs = [a.name for a in forward.schema.arguments]
    outputs = [r.name for r in forward.schema.returns]
    early = inputs[-1] == "needs"
    wanted = [a.name for a in backward.schema.arguments]
    # The first and the last input of each of backward's results; one and the same but for a shared gradient.
    targets = [(inputs.index(names[0]), inputs.index(names[-1])) for names in map(_inputs_of, backward.schema.returns)]
    trained = sorted({i for pair in targets for i in pair})
    gradients = [outputs.index(n.removeprefix("grad_")) for n in wanted if n.startswith("grad_") and n.removeprefix("grad_") in outputs]
    rest = wanted[len(gradients) : -1]
    # Tensors are kept by autograd, options by the context; order is where backward finds each in the two behind one another.
    tensors = {a.name for a in forward.schema.arguments if "Tensor" in str(a.type)} | set(outputs)
    names = [*inputs, *outputs]
    kept = [names.index(n) for n in rest if n in tensors]
    options = [names.index(n) for n in rest if n not in tensors]
    order = [[*kept, *options].index(names.index(n)) for n in rest]
    constants = [i for i in range(public) if i not in gradients]
    if wanted[-1] != "needs" or gradients != sorted(gradients) or any(g >= public for g in gradients):
        raise TypeError(f"{backward.name}: its arguments must be grad_<public output>…, kept values…, needs; got {wanted}")
    count = len(inputs)
    title = forward.name
    name = title.split("::")[1]

    def keep(ctx: Any, args: tuple[Any, ...], results: Outputs) -> None:
        values = (*args, *results)
        given = ctx.needs_input_grad
        ctx.save_for_backward(*[values[i] for i in kept])
        ctx.options = [args[i] for i in options]
        ctx.needs = [given[first] or given[last] for first, last in targets]
        ctx.set_materialize_grads(False)
        if constants:
            ctx.mark_non_differentiable(*[results[i] for i in constants if results[i] is not None])

    def derive(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise GradientError(
                f"{title}: the gradient must not be differentiated again, got create_graph=True; write that part in plain PyTorch"
            )
        for i in gradients:
            if grads[i] is not None:
                break
        else:
            return (None,) * count
        values = (*ctx.saved_tensors, *ctx.options)
        results = backward(*[grads[i] for i in gradients], *[values[i] for i in order], ctx.needs)
        answer: list[Any] = [None] * count
        for (first, last), result in zip(targets, results, strict=True):
            answer[first] = answer[last] = result
        return tuple(answer)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            results = forward(*args)
            keep(ctx, args, results)
            return results[0] if public == 1 else tuple(results[:public])

        backward = staticmethod(derive)

    traced = forward.tie(backward, public, Function.apply)
    no = [False] * len(targets)

    def call(*args: Any) -> Any:
        if _is_transforming() and any(map(_is_transformed, args)):
            forward.refuse_transform(name)
        asked = False
        if torch.is_grad_enabled():
            for i in trained:
                if args[i] is not None and args[i].requires_grad:
                    asked = True
                    break
        if early:
            args = (*args, [_asks(args[first]) or _asks(args[last]) for first, last in targets] if asked else no)
        if asked:
            return traced(*args) if torch.compiler.is_compiling() else Function.apply(*args)  # type: ignore[no-untyped-call]
        results = forward(*args)
        return results[0] if public == 1 else tuple(results[:public])

    call.__name__ = call.__qualname__ = name
    return call


def _is_transforming() -> bool:
    """Whether a torch.func transform or a level of forward-mode AD is open."""
    return forward_ad._current_level >= 0 or _transform() is not None


# As `_settle` in op.py: a compiler that traces takes the answer as it is.
_is_transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_transformed(value: Any) -> bool:
    """Whether a value is batched, differentiated by torch.func, or has a tangent."""
    if not isinstance(value, Tensor):
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(value) or forward_ad.unpack_dual(value).tangent is not None


def _asks(value: Tensor | None) -> bool:
    return value is not None and value.requires_grad


def _inputs_of(result: Any) -> list[str]:
    """The inputs whose gradient a result of a backward kernel is."""
    names: list[str] = result.name.removeprefix("grad_").split("_and_")
    return names
