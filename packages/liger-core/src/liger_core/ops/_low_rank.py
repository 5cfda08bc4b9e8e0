# SPDX-License-Identifier: Apache-2.0
"""The matmuls of a low-rank adapter: how a float32 adapter meets low-precision rows without casting them.

A float32 matrix is the sum of three bfloat16 ones, high + middle + low, each of which has 8 bits of its mantissa. Long
rows meet all three in one pass. A product of two such sums that is rounded to bfloat16 itself needs only high·high +
middle·high + low·high + high·middle: one matmul of four times the rank, [high, middle, low, high] @ [high, high, high,
middle]ᵀ. The rank is small, so this costs the tensor cores little, and long matrices are read as often as with one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core.autograd import differentiable
from liger_core.kernels import Kernel, Outputs, multiply
from liger_core.op import accumulator
from liger_core.ops._inputs import row_blocks

# The thirds (0 high, 1 middle, 2 low) whose products, side by side, make the product of two split matrices.
LEFT, RIGHT = (0, 1, 2, 0), (0, 0, 0, 1)
# The most elements that the reference converts to float32 at a time.
REFERENCE_BLOCK = 1 << 22


class RankPasses(NamedTuple):
    """The passes that a backend provides: products of long matrices with the adapter's factors.

    project  (rows, factor (rank, columns), scale, out): scale · rows @ factorᵀ as a left factor, see `factor_columns`
    reduce   (left factor, rows, out (rank, columns)): the sum over all rows of factorᵀ @ rows
    right    (matrix (columns, rank), dtype of rows): the right factor that a left one is multiplied with
    combine  (unscaled, columns, bias, left factor, right, out): columns · unscaled + left @ right + bias, rounded once
    dot      (rows, other, out (columns,)): the sum over all rows of rows · other
    """

    project: Callable[[Tensor, Tensor, float, Tensor], None]
    reduce: Callable[[Tensor, Tensor, Tensor], None]
    right: Callable[[Tensor, torch.dtype], Tensor]
    combine: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], None]
    dot: Callable[[Tensor, Tensor, Tensor], None]


class LowRankGradients(NamedTuple):
    """The gradients of all inputs; None for those that are not required."""

    grad_x: Tensor | None
    grad_weight: Tensor | None
    grad_a: Tensor | None
    grad_b: Tensor | None
    grad_bias: Tensor | None
    grad_base: Tensor | None


def is_split(rows: torch.dtype, adapter: torch.dtype) -> bool:
    """Whether the adapter is split into three matrices in the rows' dtype; float16 lacks the range for it."""
    return rows == torch.bfloat16 and adapter == torch.float32


def thirds(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split a float32 matrix into its high, middle and low third; each difference is exact."""
    high = matrix.to(torch.bfloat16)
    rest = matrix - high
    middle = rest.to(torch.bfloat16)
    return high, middle, (rest - middle).to(torch.bfloat16)


def right_factor(matrix: Tensor, rows: torch.dtype) -> Tensor:
    """Return a matrix (columns, rank) as the right factor for a left factor of rows of this dtype."""
    if not is_split(rows, matrix.dtype):
        return matrix
    parts = thirds(matrix)
    return torch.cat([parts[i] for i in RIGHT], 1)


def factor_columns(rows: Tensor, adapter: Tensor, rank: int) -> tuple[int, torch.dtype]:
    """Return a left factor's number of columns and dtype: float32 for float16, where scaled sums may overflow."""
    if is_split(rows.dtype, adapter.dtype):
        return len(LEFT) * rank, rows.dtype
    return rank, torch.float32 if adapter.dtype == torch.float16 else adapter.dtype


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, summed in float32 (float64 for float64); only GPUs multiply low precision without casts."""
    wide = accumulator(torch.promote_types(a.dtype, b.dtype))
    if a.dtype == b.dtype != wide and a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def project(rows: Tensor, matrix: Tensor, scale: float, out: Tensor) -> None:
    if not is_split(rows.dtype, matrix.dtype):
        out.copy_(matmul(rows, matrix.t()).mul_(scale))
        return
    parts = matmul(rows, torch.cat(thirds(matrix)).t()).unflatten(1, (3, -1))
    split = thirds(parts.sum(1).mul_(scale))
    torch.cat([split[i] for i in LEFT], 1, out=out)


def reduce(left: Tensor, rows: Tensor, out: Tensor) -> None:
    rank = out.shape[0]
    if left.shape[1] == rank:
        out.copy_(matmul(left.t(), rows))
        return
    torch.sum(matmul(left[:, : 3 * rank].t(), rows).unflatten(0, (3, -1)), 0, out=out)


def combine(unscaled: Tensor, columns: Tensor, bias: Tensor | None, left: Tensor, right: Tensor, out: Tensor) -> None:
    for rows in row_blocks(out, REFERENCE_BLOCK):
        sums = matmul(left[rows], right).addcmul_(unscaled[rows].to(columns.dtype), columns)
        out[rows] = sums if bias is None else sums.add_(bias)


def dot(rows: Tensor, other: Tensor, out: Tensor) -> None:
    out.zero_()
    for block in row_blocks(rows, REFERENCE_BLOCK):
        out += (rows[block].to(out.dtype) * other[block]).sum(0)


TORCH_PASSES = RankPasses(project, reduce, right_factor, combine, dot)


class LowRank:
    """The kernels of linear layers with an adapter, for a backend's passes."""

    def __init__(self, passes: RankPasses, make_kernel: Callable[..., Kernel]) -> None:
        self.passes = passes
        self.project = make_kernel("lora_project", self._allocate_project, self._launch_project)
        self.linear = differentiable(
            make_kernel("lora_linear", self._allocate, self._launch),
            make_kernel("lora_linear_backward", self._allocate_backward, self._launch_backward, self._recycle_backward),
            saves=("x", "weight", "a", "b", "projected"),
            keep_first=True,
        )
        self.scaled = differentiable(
            make_kernel("lora_linear_scaled", self._allocate_scaled, self._launch_scaled),
            make_kernel("lora_linear_scaled_backward", self._allocate_scaled_backward, self._launch_scaled_backward),
            saves=("x", "weight", "a", "b", "base", "columns", "layer_output", "projected"),
        )

    def __call__(
        self, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, scale: float, bias: Tensor | None,
        base: Tensor | None, columns: Tensor | None,
    ) -> Tensor:  # fmt: skip
        self.project.check_plain((x, weight, a, b, bias, base, columns), "lora_linear")
        # Constant for autograd: the backward pass below includes the gradients of x and a through it.
        with torch.no_grad():
            (projected,) = self.project(x, a, scale)
        y: Tensor
        if columns is None:
            y = self.linear(x, weight, a, b, bias, base, projected, scale)
        else:
            y = self.scaled(x, weight, a, b, bias, base, columns, projected, scale)
        return y

    def _allocate_project(self, x: Tensor, a: Tensor, scale: float) -> Outputs:
        columns, dtype = factor_columns(x, a, a.shape[0])
        return (torch.empty(x.shape[0], columns, dtype=dtype, device=x.device),)

    def _launch_project(self, projected: Tensor, /, x: Tensor, a: Tensor, scale: float) -> None:
        self.passes.project(x, a, scale, projected)

    def _allocate(
        self, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, bias: Tensor | None, base: Tensor | None,
        projected: Tensor, scale: float
    ) -> Outputs:  # fmt: skip
        return (torch.empty(x.shape[0], b.shape[0], dtype=x.dtype if base is None else base.dtype, device=x.device),)

    def _launch(
        self, y: Tensor, /, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, bias: Tensor | None,
        base: Tensor | None, projected: Tensor, scale: float,
    ) -> None:  # fmt: skip
        compute(self.passes, y, x, weight, b, bias, base, projected)

    def _allocate_backward(
        self, grad_y: Tensor, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, projected: Tensor, scale: float,
        needs: list[bool],
    ) -> Outputs:  # fmt: skip
        (rows, outer), device = grad_y.shape, x.device
        return (
            torch.empty(x.shape, dtype=x.dtype, device=device) if needs[0] else None,
            torch.empty(weight.shape, dtype=weight.dtype, device=device) if needs[1] and weight is not None else None,
            torch.empty(a.shape, dtype=a.dtype, device=device) if needs[2] else None,
            torch.empty(b.shape, dtype=b.dtype, device=device) if needs[3] else None,
            torch.empty(outer, dtype=x.dtype, device=device) if needs[4] else None,
            torch.empty(rows, outer, dtype=grad_y.dtype, device=device) if needs[5] else None,
        )

    def _recycle_backward(
        self, grad_y: Tensor, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, projected: Tensor, scale: float,
        needs: list[bool],
    ) -> Outputs:  # fmt: skip
        """Reuse the upstream gradient as the gradient of base."""
        gradients = self._allocate_backward(grad_y, x, weight, a, b, projected, scale, [*needs[:5], False])
        return (*gradients[:5], grad_y if needs[5] else None)

    def _launch_backward(
        self, gradients: LowRankGradients, /, grad_y: Tensor, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor,
        projected: Tensor, scale: float, needs: list[bool],
    ) -> None:  # fmt: skip
        if gradients.grad_base is not None and gradients.grad_base is not grad_y:
            gradients.grad_base.copy_(grad_y)
        self._gradients(gradients, grad_y, grad_y, x, weight, a, b, projected, scale)

    def _gradients(
        self, gradients: LowRankGradients, grad_y: Tensor, grad_layer: Tensor, x: Tensor, weight: Tensor | None,
        a: Tensor, b: Tensor, projected: Tensor, scale: float,
    ) -> None:  # fmt: skip
        """Compute all gradients but that of base from the upstream gradients of the adapter and of the layer itself."""
        grad_x, grad_weight, grad_a, grad_b, grad_bias, _ = gradients
        # grad_y is wider than x only beside a wider base; an adapter in the dtype of x needs no such precision.
        if a.dtype == x.dtype:
            grad_y = grad_y.to(x.dtype)
        if grad_x is not None or grad_a is not None:
            columns, dtype = factor_columns(grad_y, b, b.shape[1])
            grad_projected = torch.empty(grad_y.shape[0], columns, dtype=dtype, device=x.device)
            self.passes.project(grad_y, b.t(), scale, grad_projected)
            if grad_x is not None:
                right = self.passes.right(a.t(), grad_y.dtype).t()
                add_all(None, grad_projected, right, () if weight is None else ((grad_layer, weight),), grad_x)
            if grad_a is not None:
                self.passes.reduce(grad_projected, x, grad_a)
        if grad_b is not None:
            self.passes.reduce(projected, grad_y, grad_b.t())
        if grad_weight is not None:
            multiply(grad_weight, grad_layer.t(), x)
        if grad_bias is not None:
            grad_bias.copy_(grad_y.sum(0, dtype=accumulator(grad_y.dtype)))

    # With a factor for each column: y = columns · (x weightᵀ or base) + projected (columns · b)ᵀ + bias.

    def _allocate_scaled(
        self, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, bias: Tensor | None, base: Tensor | None,
        columns: Tensor, projected: Tensor, scale: float,
    ) -> Outputs:  # fmt: skip
        (y,) = self._allocate(x, weight, a, b, None, base, projected, scale)
        assert y is not None
        return y, None if weight is None else torch.empty_like(y)

    def _launch_scaled(
        self, y: Tensor, layer_output: Tensor | None, /, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor,
        bias: Tensor | None, base: Tensor | None, columns: Tensor, projected: Tensor, scale: float,
    ) -> None:  # fmt: skip
        if weight is not None and layer_output is not None:
            multiply(layer_output, x, weight.t())
        unscaled = base if layer_output is None else layer_output
        assert unscaled is not None
        right = self.passes.right(scaled_rows(b, columns), x.dtype).t()
        self.passes.combine(unscaled, columns, bias, projected, right, y)

    def _allocate_scaled_backward(
        self, grad_y: Tensor, x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, base: Tensor | None,
        columns: Tensor, layer_output: Tensor | None, projected: Tensor, scale: float, needs: list[bool],
    ) -> Outputs:  # fmt: skip
        gradients = self._allocate_backward(grad_y, x, weight, a, b, projected, scale, needs[:6])
        return *gradients, torch.empty_like(columns) if needs[6] else None

    def _launch_scaled_backward(
        self, gradients: LowRankGradients, grad_columns: Tensor | None, /, grad_y: Tensor, x: Tensor,
        weight: Tensor | None, a: Tensor, b: Tensor, base: Tensor | None, columns: Tensor, layer_output: Tensor | None,
        projected: Tensor, scale: float, needs: list[bool],
    ) -> None:  # fmt: skip
        grad_layer = grad_y
        if gradients.grad_base is not None or (
            weight is not None and (gradients.grad_x is not None or gradients.grad_weight is not None)
        ):
            grad_layer = torch.empty_like(grad_y) if gradients.grad_base is None else gradients.grad_base
            torch.mul(grad_y, columns, out=grad_layer)
        grad_b = gradients.grad_b
        # The gradient of columns · b, from which b and columns get theirs.
        product = (
            None
            if grad_b is None and grad_columns is None
            else torch.empty(b.shape, dtype=columns.dtype, device=b.device)
        )
        # b is scaled, not grad_y: the adapter's gradients come from an upstream gradient that is not rounded.
        scaled = scaled_rows(b, columns)
        self._gradients(gradients._replace(grad_b=product), grad_y, grad_layer, x, weight, a, scaled, projected, scale)
        if product is None:
            return
        if grad_b is not None:
            torch.mul(product, columns[:, None], out=grad_b)
        if grad_columns is not None:
            unscaled = base if layer_output is None else layer_output
            assert unscaled is not None
            self.passes.dot(grad_y, unscaled, grad_columns)
            grad_columns += (product * b).sum(1)


def scaled_rows(b: Tensor, columns: Tensor) -> Tensor:
    return (b * columns[:, None]).to(b.dtype)


def compute(
    passes: RankPasses, y: Tensor, x: Tensor, weight: Tensor | None, b: Tensor, bias: Tensor | None,
    base: Tensor | None, projected: Tensor,
) -> None:  # fmt: skip
    """Compute a layer with its adapter from x and from x aᵀ as a left factor."""
    right = passes.right(b, x.dtype).t()
    add_all(base if weight is None else bias, projected, right, () if weight is None else ((x, weight.t()),), y)


def add_all(
    base: Tensor | None, left: Tensor, right: Tensor, large: Sequence[tuple[Tensor, Tensor]], out: Tensor
) -> None:
    """Write base + left @ right + Σ rows @ matrix over the large products into out."""
    if out.dtype == torch.float16:
        # The adapter's product alone may overflow; plain PyTorch rounds only the products of the layers.
        for rows, matrix in large:
            multiply(out, rows, matrix, base)
            base = out
        add_product(base, left, right, out)
        return
    # The small product comes first: the large matmuls add to it without another pass.
    add_product(base, left, right, out)
    for rows, matrix in large:
        multiply(out, rows, matrix, out)


def add_product(base: Tensor | None, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write base + left @ right into out, rounded once."""
    if left.dtype == out.dtype and (base is None or base.dtype == out.dtype):
        multiply(out, left, right, base)
    elif base is not None and left.dtype != out.dtype == base.dtype == torch.float32 and left.is_cuda:
        torch.addmm(base, left, right, out_dtype=torch.float32, out=out)
    else:
        product = matmul(left, right)
        out.copy_(product if base is None else base + product)


@functools.cache
def low_rank(passes: RankPasses, make_kernel: Callable[..., Kernel]) -> Any:
    return LowRank(passes, make_kernel)
