# SPDX-License-Identifier: Apache-2.0
"""Two or three linear layers with adapters on one x: one pass over x for all adapters, and one gradient of x."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.autograd import differentiable
from liger_core.kernels import Kernel, Outputs, multiply
from liger_core.op import accumulator
from liger_core.ops._low_rank import RankPasses, add_all, compute, factor_columns


class Layer(NamedTuple):
    """The tensors of one layer that the backward pass needs, including x aᵀ as a left factor."""

    weight: Tensor | None
    a: Tensor
    b: Tensor
    projected: Tensor


class Layers(NamedTuple):
    """The fields of every `Layer`; those of the third may be absent."""

    weight: Tensor | None
    a: Tensor
    b: Tensor
    projected: Tensor
    weight_2: Tensor | None
    a_2: Tensor
    b_2: Tensor
    projected_2: Tensor
    weight_3: Tensor | None
    a_3: Tensor | None
    b_3: Tensor | None
    projected_3: Tensor | None


class Own(NamedTuple):
    """The term that each layer adds to its adapter's product: its bias, or its complete output without the adapter."""

    bias: Tensor | None
    base: Tensor | None
    bias_2: Tensor | None
    base_2: Tensor | None
    bias_3: Tensor | None
    base_3: Tensor | None


class LayerGradients(NamedTuple):
    """The gradients of one layer's tensors; None for those that are not required."""

    grad_weight: Tensor | None
    grad_a: Tensor | None
    grad_b: Tensor | None
    grad_bias: Tensor | None
    grad_base: Tensor | None


class Gradients(NamedTuple):
    """The gradient of x, and the fields of every layer's `LayerGradients`."""

    grad_x: Tensor | None
    grad_weight: Tensor | None
    grad_a: Tensor | None
    grad_b: Tensor | None
    grad_bias: Tensor | None
    grad_base: Tensor | None
    grad_weight_2: Tensor | None
    grad_a_2: Tensor | None
    grad_b_2: Tensor | None
    grad_bias_2: Tensor | None
    grad_base_2: Tensor | None
    grad_weight_3: Tensor | None
    grad_a_3: Tensor | None
    grad_b_3: Tensor | None
    grad_bias_3: Tensor | None
    grad_base_3: Tensor | None


class Branch(NamedTuple):
    """One layer in the backward pass, with its upstream gradient."""

    grad_y: Tensor
    layer: Layer
    gradients: LayerGradients


class LowRankLayers:
    """The kernels of several linear layers with adapters on one x, for a backend's passes."""

    def __init__(self, passes: RankPasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        self.project = make_kernel("lora_project_layers", self._allocate_project, self._launch_project)
        self.linears = differentiable(
            make_kernel("lora_linears", self._allocate, self._launch),
            make_kernel(
                "lora_linears_backward", self._allocate_backward, self._launch_backward, self._recycle_backward
            ),
            saves=("x", *Layers._fields),
            public=3,
        )

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor | None], a: Any, b: Any, scale: float, terms: Own
    ) -> tuple[Tensor, ...]:
        self.project.check_plain((x, *weights, *a, *b, *terms), "lora_linears")
        # Constant for autograd: the backward pass below includes the gradients of x and of every a through them.
        with torch.no_grad():
            projected = self.project(x, *a, scale)
        layers = Layers._make(tensor for layer in zip(weights, a, b, projected, strict=True) for tensor in layer)
        outputs: Outputs = self.linears(x, layers, terms, scale)
        return tuple(y for y in outputs if y is not None)

    def _allocate_project(self, x: Tensor, a: Tensor, a_2: Tensor, a_3: Tensor | None, scale: float) -> Outputs:
        def factor(a: Tensor) -> Tensor:
            columns, dtype = factor_columns(x, a, a.shape[0])
            return torch.empty(x.shape[0], columns, dtype=dtype, device=x.device)

        return factor(a), factor(a_2), None if a_3 is None else factor(a_3)

    def _launch_project(
        self, projected: Tensor, projected_2: Tensor, projected_3: Tensor | None, /, x: Tensor, a: Tensor, a_2: Tensor,
        a_3: Tensor | None, scale: float,
    ) -> None:  # fmt: skip
        matrices = [matrix for matrix in (a, a_2, a_3) if matrix is not None]
        joint = torch.cat(matrices)
        columns, dtype = factor_columns(x, joint, joint.shape[0])
        factor = torch.empty(x.shape[0], columns, dtype=dtype, device=x.device)
        self.passes.project(x, joint, scale, factor)
        for out, of_layer in zip((projected, projected_2, projected_3), _split(factor, matrices), strict=False):
            assert out is not None
            out.view(of_layer.shape).copy_(of_layer)

    def _allocate(self, x: Tensor, layers: Layers, terms: Own, scale: float) -> Outputs:
        bases = terms[1::2]
        return tuple(
            None
            if b is None
            else torch.empty(x.shape[0], b.shape[0], dtype=x.dtype if base is None else base.dtype, device=x.device)
            for b, base in zip(layers[2::4], bases, strict=True)
        )

    def _launch(
        self, y: Tensor, y_2: Tensor, y_3: Tensor | None, /, x: Tensor, layers: Layers, terms: Own, scale: float
    ) -> None:
        for out, layer, bias, base in zip((y, y_2, y_3), _layers(layers), terms[::2], terms[1::2], strict=False):
            assert out is not None
            compute(self.passes, out, x, layer.weight, layer.b, bias, base, layer.projected)

    def _allocate_backward(
        self, grad_y: Tensor | None, grad_y_2: Tensor | None, grad_y_3: Tensor | None, x: Tensor, layers: Layers,
        scale: float, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        def like(tensor: Tensor | None, needed: bool) -> Tensor | None:
            return (
                torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                if needed and tensor is not None
                else None
            )

        gradients = [like(x, needs[0])]
        for number, (grad, layer) in enumerate(zip((grad_y, grad_y_2, grad_y_3), _layers(layers), strict=False)):
            layer_needs = [grad is not None and need for need in needs[1 + 5 * number : 6 + 5 * number]]
            gradients += [like(tensor, need) for tensor, need in zip(layer, layer_needs, strict=False)][:3]
            gradients += [x.new_empty(layer.b.shape[0]) if layer_needs[3] else None, like(grad, layer_needs[4])]
        return (*gradients, *[None] * (len(Gradients._fields) - len(gradients)))

    def _recycle_backward(
        self, grad_y: Tensor | None, grad_y_2: Tensor | None, grad_y_3: Tensor | None, x: Tensor, layers: Layers,
        scale: float, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        """Reuse each upstream gradient as the gradient of its base."""
        of_bases = {5: grad_y, 10: grad_y_2, 15: grad_y_3}
        others = [need and index not in of_bases for index, need in enumerate(needs)]
        gradients = self._allocate_backward(grad_y, grad_y_2, grad_y_3, x, layers, scale, others)
        return tuple(
            of_bases[index] if index in of_bases and needs[index] else value for index, value in enumerate(gradients)
        )

    def _launch_backward(
        self, gradients: Gradients, /, grad_y: Tensor | None, grad_y_2: Tensor | None, grad_y_3: Tensor | None,
        x: Tensor, layers: Layers, scale: float, needs: list[bool],
    ) -> None:  # fmt: skip
        branches = []
        for number, (grad, layer) in enumerate(zip((grad_y, grad_y_2, grad_y_3), _layers(layers), strict=False)):
            if grad is None:
                continue
            layer_gradients = LayerGradients._make(gradients[1 + 5 * number : 6 + 5 * number])
            if layer_gradients.grad_base is not None and layer_gradients.grad_base is not grad:
                layer_gradients.grad_base.copy_(grad)
            # As in _low_rank.py: an adapter in the dtype of x needs no wider upstream gradient.
            branch = Branch(grad.to(x.dtype) if layer.a.dtype == x.dtype else grad, layer, layer_gradients)
            self._of_layer(branch, x)
            branches.append(branch)
        if gradients.grad_x is None:
            branches = [branch for branch in branches if branch.gradients.grad_a is not None]
        if branches:
            self._of_input(gradients.grad_x, branches, x, scale)

    def _of_layer(self, branch: Branch, x: Tensor) -> None:
        """Compute a layer's gradients of b, weight and bias, which need only x aᵀ, x and the upstream gradient."""
        grad_y, layer, gradients = branch
        if gradients.grad_b is not None:
            self.passes.reduce(layer.projected, grad_y, gradients.grad_b.t())
        if gradients.grad_weight is not None:
            multiply(gradients.grad_weight, grad_y.t(), x)
        if gradients.grad_bias is not None:
            gradients.grad_bias.copy_(grad_y.sum(0, dtype=accumulator(grad_y.dtype)))

    def _of_input(self, grad_x: Tensor | None, branches: list[Branch], x: Tensor, scale: float) -> None:
        """Compute the gradients of x and of every a by one matmul each: the products with every b lie side by side."""
        matrices = [branch.layer.a for branch in branches]
        joint, grad_y = torch.cat(matrices), branches[0].grad_y
        columns, dtype = factor_columns(grad_y, joint, joint.shape[0])
        grad_projected = torch.empty(x.shape[0], columns, dtype=dtype, device=x.device)
        for branch, block in zip(branches, _split(grad_projected, matrices), strict=True):
            of_layer = torch.empty(block.flatten(1).shape, dtype=dtype, device=x.device)
            self.passes.project(branch.grad_y, branch.layer.b.t(), scale, of_layer)
            block.copy_(of_layer.view(block.shape))
        if grad_x is not None:
            right = self.passes.right(joint.t(), grad_y.dtype).t()
            # The layers' products are added in place: no layer has its own gradient of x.
            large = [(branch.grad_y, branch.layer.weight) for branch in branches if branch.layer.weight is not None]
            add_all(None, grad_projected, right, large, grad_x)
        if any(branch.gradients.grad_a is not None for branch in branches):
            total = torch.empty_like(joint)
            self.passes.reduce(grad_projected, x, total)
            for branch, grad_a in zip(branches, total.split([len(matrix) for matrix in matrices]), strict=True):
                if branch.gradients.grad_a is not None:
                    branch.gradients.grad_a.copy_(grad_a)


def _layers(layers: Layers) -> list[Layer]:
    every = [Layer._make(layers[first : first + 4]) for first in range(0, len(layers), 4)]
    return [layer for layer in every if layer.a is not None]


def _split(factor: Tensor, matrices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return each matrix's columns (rows, thirds, rank) in a left factor of all matrices."""
    ranks = [matrix.shape[0] for matrix in matrices]
    thirds = factor.shape[1] // max(1, sum(ranks))
    parts: tuple[Tensor, ...] = factor.view(factor.shape[0], thirds, sum(ranks)).split(ranks, 2)
    return parts


@functools.cache
def low_rank_layers(passes: RankPasses, make_kernel: Callable[..., Kernel]) -> Any:
    return LowRankLayers(passes, make_kernel)
