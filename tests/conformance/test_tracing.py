# SPDX-License-Identifier: Apache-2.0
"""Custom ops, torch.compile and fake tensors: a traced call does what eager Python does."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from conformance.cases import Case, arguments_of, leaves, sample_names, takes_minutes, with_gradients
from conformance.cases import differentiable as differentiable_arguments
from conformance.running import Trial, run
from liger_core import Op, use
from liger_core.autograd import differentiable
from liger_core.errors import GradientError
from liger_core.kernels import Kernel
from liger_core.plugins import registry

pytestmark = pytest.mark.slow


class Recorder(TorchDispatchMode):
    """Keeps every call of a custom op of ours, with detached arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("liger"):
            self.calls.append((func, *tree_map_only(Tensor, Tensor.detach, (tuple(args), dict(kwargs or {})))))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def form_of(value: Any) -> Any:
    """What sets calls of a custom op apart: which tensors are given, their dtypes and the options, but neither sizes
    nor numbers."""
    if isinstance(value, Tensor):
        return value.dtype, value.numel() == 0
    if isinstance(value, list | tuple):
        return tuple(form_of(part) for part in value)
    return value if isinstance(value, str | bool | torch.dtype) else type(value)


def test_every_custom_op_that_a_sample_reaches_passes_opcheck(
    implementation: tuple[Op[..., Any], str, Any], device: torch.device
) -> None:
    """One call of every form, from all samples of the op together."""
    op, backend, _ = implementation
    checked, failed = set[Any](), list[str]()
    for name in sample_names(op, device, torch.float32):
        case = Case(op, backend, torch.float32, name, device)
        if takes_minutes(case):
            continue
        sample = case.sample()
        arguments = arguments_of(op, sample)
        with Recorder() as recorder:
            run(case.call, arguments, differentiable_arguments(arguments, sample))
        for func, args, kwargs in recorder.calls:
            form = (func, form_of(args), form_of(tuple(kwargs.items())))
            if form in checked:
                continue
            checked.add(form)
            try:
                torch.library.opcheck(func, args, kwargs)
            except torch.testing._internal.optests.OpCheckError as error:
                failed.append(f"sample {name}: {func}: {error}")
    assert failed == []


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiling_breaks_no_graph_and_changes_no_result(form_case: Case) -> None:
    trial = Trial(form_case)
    with use(form_case.backend, only=[form_case.op]):
        compiled = torch.compile(lambda given: form_case.op(**given), fullgraph=True, backend="aot_eager")
        got = run(compiled, trial.arguments, trial.names, trial.cotangents)
    trial.expect(trial.complaints(got))


class Called(nn.Module):
    """A call of an op with these options; its tensors come by name."""

    def __init__(self, op: Op[..., Any], options: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.options = op, options

    def forward(self, **tensors: Tensor) -> Any:
        return self.op(**self.options, **tensors)


def test_an_exported_call_gives_gradients_to_what_was_frozen_when_it_was_exported(pattern_case: Case) -> None:
    trial = Trial(pattern_case)
    frozen = {name: value.detach() for name, value in trial.arguments.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in trial.arguments.items() if name not in frozen}
    with use(pattern_case.backend, only=[pattern_case.op]):
        exported = torch.export.export(Called(pattern_case.op, options), (), frozen).module()
        given = trial.arguments, trial.names, trial.cotangents
        got = run(lambda arguments: exported(**{name: arguments[name] for name in frozen}), *given)
    trial.expect(trial.complaints(got))


class Partition:
    """A compiler backend that runs the graphs as they are and keeps them: first the forward, then the backward."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []
        self.backend = aot_autograd(
            fw_compiler=self.keep, bw_compiler=self.keep, partition_fn=min_cut_rematerialization_partition
        )

    def keep(self, module: fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(module.graph)
        return make_boxed_func(module)

    def saved(self) -> list[fx.Node]:
        """What the forward computes and the backward reads."""
        if len(self.graphs) < 2:
            return []
        forward, backward = self.graphs
        read = {node.name for node in backward.nodes if node.op == "placeholder"}
        computed = [node for node in forward.output_node().all_input_nodes if node.op == "call_function"]
        return [node for node in computed if node.name in read]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_checkpointed_call_saves_no_result_when_compiled(pattern_case: Case) -> None:
    trial, partition = Trial(pattern_case), Partition()
    with use(pattern_case.backend, only=[pattern_case.op]):
        compiled = torch.compile(
            lambda given: checkpoint(lambda: pattern_case.op(**given), use_reentrant=False),
            fullgraph=True,
            backend=partition.backend,
        )
        got = run(compiled, trial.arguments, trial.names, trial.cotangents)
    assert [str(node.target) for node in partition.saved()] == []
    # The graphs call the kernels themselves: one that has to ask autograd first costs the host twice as much.
    targets = [node.target for graph in partition.graphs for node in graph.nodes]
    called = {target.name() for target in targets if isinstance(target, torch._ops.OpOverload)}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [name for name in called if has_kernel(name, "Autograd") and "liger" in name] == []
    trial.expect(trial.complaints(got))


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(form_case: Case) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not registry().backends[form_case.backend].supports_fake_tensors:
        pytest.skip(f"{form_case.backend} does not support fake tensors")
    trial = Trial(form_case)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in trial.arguments.items()}
        outputs = leaves(form_case.call(with_gradients(fakes, trial.names)))
    real = leaves(form_case.call(trial.arguments))
    fake, wanted = ({n: (t.shape, t.dtype, t.device) for n, t in found.items()} for found in (outputs, real))
    assert fake == wanted


def copying(name: str) -> tuple[Kernel, Kernel]:
    """Kernels named after `name`: y is a copy of x, and the gradient of x that of y."""

    def copy(y: Tensor, /, x: Tensor) -> None:
        y.copy_(x)

    def copy_back(grad_x: Tensor, /, grad_y: Tensor, needs: list[bool]) -> None:
        grad_x.copy_(grad_y)

    def like(value: Tensor, *rest: object) -> tuple[Tensor]:
        return (torch.empty_like(value),)

    return Kernel("liger_test", name, like, copy), Kernel("liger_test", f"{name}_backward", like, copy_back)


def test_a_kernel_has_one_derivative() -> None:
    forward, backward = copying("one_derivative")
    differentiable(forward, backward, saves=())
    differentiable(forward, backward, saves=())
    with pytest.raises(TypeError, match="it must have one derivative"):
        differentiable(forward, copying("another")[1], saves=())


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_second_derivative_is_an_error_when_compiled_too() -> None:
    copy = differentiable(*copying("copy"), saves=())
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: copy(x), fullgraph=True, backend="eager")(x)
    with pytest.raises(GradientError, match="must not be differentiated again"):
        torch.autograd.grad((y * y).sum(), x, create_graph=True)
