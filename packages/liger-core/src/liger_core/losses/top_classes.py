# SPDX-License-Identifier: Apache-2.0
"""The most likely classes of a head, found without holding the logits."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.errors import OptionError
from liger_core.kernels import multiply
from liger_core.ops.head.head import Head, autocast_inputs, check_head

# The most rows of a block of logits: enough for a large matmul.
ROWS = 8192


def top_classes(
    hidden: Tensor, weight: Tensor, k: int, *, target: Tensor | None = None, bias: Tensor | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, budget: int = 64 << 20,
) -> Tensor:  # fmt: skip
    """Return the k most likely classes of each row, the most likely first; without a gradient.

        indices of the k largest of logit_scale · (hidden @ weightᵀ + bias)

    hidden       (..., H)
    weight       (V, H)
    bias         (V,)
    target       (...)   rows with ignore_index are left out of the matmul, and get ignore_index k times
    logit_scale  only its sign matters; softcap and temperature do not change the order
    budget       bytes of logits held at a time: blocks of up to 8192 rows and at least 2k classes
    returns      (..., k) int64, targets for linear_log_prob

    To distill a teacher at the policy's own most likely classes:

        classes = top_classes(hidden, weight, 8, target=target)
        log_prob = linear_log_prob(hidden, weight, classes)
        loss = topk_distillation(log_prob, teacher_log_prob, kind="reverse_kl")[target != -100].mean()

    This takes one matmul in addition to those of linear_log_prob, which needs the classes first. Raises ShapeError,
    DtypeError, OptionError for arguments that do not fit.
    """
    name = "losses.top_classes"
    shape = hidden.shape[:-1] if isinstance(hidden, Tensor) else ()
    check_head(
        name, Head(hidden, weight, hidden.new_zeros(shape, dtype=torch.int64) if target is None else target, bias)
    )
    if not isinstance(k, int) or isinstance(k, bool) or not 0 < k <= weight.shape[0]:
        checks.fail(OptionError, name, f"k must be between 1 and the {weight.shape[0]} classes, got {k!r}")
    checks.positive(name, "budget", budget)
    with torch.no_grad():
        hidden, weight, bias = autocast_inputs(hidden, weight, bias)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if target is None:
            return _top(rows, weight, bias, k, logit_scale < 0, budget).reshape(*shape, k)
        classes = torch.full((*shape, k), ignore_index, dtype=torch.int64, device=rows.device)
        counted = target != ignore_index
        classes[counted] = _top(rows[counted.reshape(-1)], weight, bias, k, logit_scale < 0, budget)
        return classes


def _top(rows: Tensor, weight: Tensor, bias: Tensor | None, k: int, lowest: bool, budget: int) -> Tensor:
    parts = [_of_rows(block, weight, bias, k, lowest, budget) for block in rows.split(ROWS)]
    return torch.cat(parts) if parts else rows.new_empty(0, k, dtype=torch.int64)


def _of_rows(rows: Tensor, weight: Tensor, bias: Tensor | None, k: int, lowest: bool, budget: int) -> Tensor:
    """Return the top classes of a block of rows; blocks of classes are merged one by one."""
    size = max(2 * k, budget // max(1, rows.shape[0] * rows.element_size()))
    values = classes = None
    for start in range(0, weight.shape[0], size):
        block = slice(start, start + size)
        logits = rows.new_empty(rows.shape[0], weight[block].shape[0])
        multiply(logits, rows, weight[block].t(), None if bias is None else bias[block])
        best = logits.topk(min(k, logits.shape[1]), dim=-1, largest=not lowest)
        block_classes = best.indices + start
        if values is None or classes is None:
            values, classes = best.values, block_classes
            continue
        merged = torch.cat((values, best.values), -1).topk(k, dim=-1, largest=not lowest)
        values, classes = merged.values, torch.cat((classes, block_classes), -1).gather(-1, merged.indices)
    assert classes is not None
    return classes
