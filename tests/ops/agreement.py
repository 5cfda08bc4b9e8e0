# SPDX-License-Identifier: Apache-2.0
"""Compares an op with a formula written out in plain PyTorch, by the project's one criterion."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.cases import in_float64
from conformance.running import output_complaints, run
from liger_core.accuracy import judge
from liger_core.kernels import plain_matmuls


def disagreements(call: Callable[..., Any], formula: Callable[..., Any], **arguments: Any) -> list[str]:
    """Where outputs, or gradients of the arguments that require one, are further from the formula in float64 than the
    formula itself."""
    names = [n for n, v in arguments.items() if isinstance(v, Tensor) and v.requires_grad]
    dtype = next(v.dtype for v in arguments.values() if isinstance(v, Tensor) and v.is_floating_point())
    with plain_matmuls():
        reference = run(lambda given: formula(**given), arguments, names)
    exact = run(lambda given: formula(**given), in_float64(arguments), names, reference.cotangents)
    got = run(lambda given: call(**given), arguments, names, reference.cotangents)
    outputs = {n: t.to(reference.outputs[n].dtype) for n, t in got.outputs.items()}
    found = output_complaints(outputs, reference.outputs, exact.outputs, dtype)
    for name, gradient in got.gradients.items():
        want, truth = reference.gradients[name], exact.gradients[name]
        if gradient is None or want is None or truth is None:
            found.append(f"gradient of {name}: a tensor expected, got {type(gradient).__name__}")
        elif complaint := judge(gradient, want, truth, dtype):
            found.append(f"gradient of {name}: {complaint}")
    return found


def leaf(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normally distributed values that require a gradient."""
    return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()


def products(run: Callable[[], Tensor], width: int) -> tuple[Tensor, list[Any]]:
    """The result, and the shapes of the matmuls whose operands share this dimension."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        result = run()
    shapes = [event.input_shapes for event in profiler.events() if event.name == "aten::mm"]
    return result, [(a, b) for a, b, *_ in shapes if a[1] == b[0] == width]


def saved(call: Callable[[], Any], *given: Any) -> list[Tensor]:
    """The tensors that a call keeps for its backward pass, those given to it left out."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        call()
    known = {value.data_ptr() for value in given if isinstance(value, Tensor)}
    return [tensor for tensor in kept if tensor.data_ptr() not in known]
