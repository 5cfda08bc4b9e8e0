# SPDX-License-Identifier: Apache-2.0
"""Compute linear layers that read the same input, such as q, k and v, in one matmul.

Parameters, gradients and state_dict keep their names and shapes. The weights become adjacent in one block of memory,
which the matmul reads as one matrix.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_core.autograd import differentiable
from liger_core.kernels import Outputs, reference_kernel
from liger_hf.patch import replacement
from liger_hf.rules.gated_mlp.rule import look
from liger_hf.rules.lora.source import sharing

# The attribute of a linear layer with its group, and its index there.
GROUP = "liger_merged_group"
# The maximum number of layers in a group.
MOST = 3


class MergedLinears:
    """Linear layers whose weights are adjacent in the memory of `whole`."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = tuple(linears)
        self.sizes = [linear.out_features for linear in linears]
        with torch.no_grad():
            self.whole = torch.cat([linear.weight for linear in linears])
            for linear, rows in zip(linears, self.whole.split(self.sizes), strict=True):
                # Each weight has its own storage, since saving a model rejects shared memory.
                linear.weight.data = torch.from_dlpack(rows)
        self.x: Tensor | None = None
        self.outputs: list[Tensor | None] = []

    def output(self, index: int, x: Tensor) -> Tensor | None:
        """Return the output of one layer, or None if it must run by itself.

        The first call with an input computes the outputs of all.
        """
        if self.x is not x:
            if (x.dtype, x.device) != (self.whole.dtype, self.whole.device) or torch.is_autocast_enabled(x.device.type):
                return None
            weights = [linear.weight for linear in self.linears]
            joint = _merged(x, self.whole, *weights, *[None] * (MOST - len(weights)))
            self.x, self.outputs = x, list(joint.split(self.sizes, -1))
        output, self.outputs[index] = self.outputs[index], None
        if all(each is None for each in self.outputs):
            # Keeping them would keep the autograd graph.
            self.x, self.outputs = None, []
        return output


def merge(model: nn.Module) -> str:
    """Merge the linear layers that can be merged; return a sentence for the user.

    Call this before the optimizer is created, because merging moves the weights to other memory.
    """
    modules = 0
    reasons: dict[str, int] = {}
    for module in model.modules():
        for names in _groups(module):
            linears = [module._modules[name] for name in names]
            reason = _problem(linears)
            if reason:
                reasons[reason] = reasons.get(reason, 0) + 1
                continue
            merged = MergedLinears(linears)  # type: ignore[arg-type]
            modules += 1
            for index, linear in enumerate(linears):
                assert linear is not None
                vars(linear)[GROUP] = merged, index
                replacement(linear, _forward, nn.Linear.forward).install()
    left = "".join(f"; left {count}: {reason}" for reason, count in reasons.items())
    return f"One matmul for the linear layers that read the same input, in {modules} modules{left}."


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    merged, index = self.__dict__[GROUP]
    output: Tensor | None = merged.output(index, x)
    return nn.functional.linear(x, self.weight, self.bias) if output is None else output


def _groups(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Yield the names of each group of linear layers to which a module's forward passes the same input."""
    if look(module) is not None:
        # Not gate and up: compiled layers would then concatenate their gradients (Llama 1B, 1 × 1024, H200: 15.45
        # instead of 15.16 ms a step).
        return
    linears = [name for name, child in module._modules.items() if isinstance(child, nn.Linear)]
    if len(linears) > 1:
        for names in sharing(type(module).forward).values():
            group = tuple(name for name in names if name in linears)
            if 1 < len(group) <= MOST:
                yield group


def _problem(linears: Sequence[Any]) -> str:
    """Return why these layers cannot be merged, or an empty string."""
    weights = [linear.weight for linear in linears]
    if any(type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter for linear in linears):
        return "they are adapted, quantized or sharded"
    if any(linear.bias is not None for linear in linears):
        return "they have a bias"
    if len({(w.dtype, w.device, w.requires_grad, w.shape[1]) for w in weights}) > 1:
        return "their weights differ in dtype, device, or whether they are trained"
    if any("forward" in vars(linear) or linear._forward_hooks or linear._forward_pre_hooks for linear in linears):
        return "they have hooks or a forward of their own"
    if weights[0].is_meta or any(hasattr(w, "ds_id") for w in weights):
        return "their weights are elsewhere"
    return ""


def _allocate(x: Tensor, whole: Tensor, a: Tensor, b: Tensor, c: Tensor | None) -> Outputs:
    return (x.new_empty((*x.shape[:-1], whole.shape[0])),)


def _launch(y: Tensor, /, x: Tensor, whole: Tensor, a: Tensor, b: Tensor, c: Tensor | None) -> None:
    torch.mm(x.reshape(-1, x.shape[-1]), _whole(whole, a, b, c).t(), out=y.view(-1, y.shape[-1]))


def _allocate_backward(
    grad_y: Tensor, x: Tensor, whole: Tensor, a: Tensor, b: Tensor, c: Tensor | None, needs: list[bool]
) -> Outputs:  # fmt: skip
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    if not any(needs[1:]):
        return grad_x, None, None, None
    sizes = [w.shape[0] for w in (a, b, c) if w is not None]
    grads = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device).split(sizes)
    return (grad_x, *grads, *[None] * (MOST - len(grads)))


def _launch_backward(
    grad_x: Tensor | None, grad_a: Tensor | None, grad_b: Tensor | None, grad_c: Tensor | None, /,
    grad_y: Tensor, x: Tensor, whole: Tensor, a: Tensor, b: Tensor, c: Tensor | None, needs: list[bool],
) -> None:  # fmt: skip
    upstream, rows = grad_y.reshape(-1, grad_y.shape[-1]), x.reshape(-1, x.shape[-1])
    if grad_x is not None:
        torch.mm(upstream, _whole(whole, a, b, c), out=grad_x.view(-1, grad_x.shape[-1]))
    if grad_a is not None:
        # `_allocate_backward` made the gradients adjacent.
        torch.mm(upstream.t(), rows, out=grad_a.as_strided(whole.shape, whole.stride()))


def _whole(whole: Tensor, *weights: Tensor | None) -> Tensor:
    """Return the weights as one matrix: a copy if any has moved, for instance because a checkpoint was assigned."""
    present = [weight for weight in weights if weight is not None]
    address = whole.data_ptr()
    for weight in present:
        if weight.data_ptr() != address:
            return torch.cat(present)
        address += weight.numel() * weight.element_size()
    return whole


_merged = differentiable(
    reference_kernel("merged_linear", _allocate, _launch),
    reference_kernel("merged_linear_backward", _allocate_backward, _launch_backward),
    saves=("x", "whole", "a", "b", "c"),
)
