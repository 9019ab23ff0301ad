"""Cross entropy over a large vocabulary without a copy of the logits in fp32.

Defined by `plain_cross_entropy`. The backward pass reads the logits once more: softmax(logits) -
onehot(target), times the gradient, in the logits' own type. With weights, rows count by them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 4096


def plain_cross_entropy(
    logits_MV: Tensor, targets_M: Tensor, weights_M: Tensor | None = None
) -> Tensor:
    """Summed over rows, each times its weight if there are weights, in fp32 or float64."""
    rows = F.cross_entropy(
        logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)),
        targets_M,
        reduction="none",
    )
    return rows.sum() if weights_M is None else rows @ weights_M.to(rows.dtype)


@triton.jit
def _loss_forward(logits, targets, loss, lse, V, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    wide = loss.dtype.element_ty
    top = tl.full((BLOCK,), float("-inf"), wide)
    total = tl.zeros((BLOCK,), wide)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * V + cols, mask=cols < V, other=float("-inf")).to(wide)
        higher = tl.maximum(top, value)
        same = higher == float("-inf")  # a lane that has seen nothing yet
        total = total * tl.where(same, 0.0, tl.exp(top - higher)) + tl.where(
            same, 0.0, tl.exp(value - higher)
        )
        top = higher
    highest = tl.max(top, 0)
    z = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(lse + row, z)
    tl.store(loss + row, z - tl.load(logits + row * V + tl.load(targets + row)).to(wide))


@triton.jit
def _loss_backward(
    logits, targets, weights, lse, grad, out, V, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr
):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z, g = tl.load(lse + row), tl.load(grad)
    if WEIGHTED:
        g *= tl.load(weights + row)
    value = tl.load(logits + row * V + cols, mask=cols < V, other=float("-inf")).to(
        lse.dtype.element_ty
    )
    value = g * (tl.exp(value - z) - tl.where(cols == tl.load(targets + row), 1.0, 0.0))
    tl.store(out + row * V + cols, value.to(out.dtype.element_ty), mask=cols < V)


def cross_entropy(logits_MV: Tensor, targets_M: Tensor, weights_M: Tensor | None = None) -> Tensor:
    """As plain_cross_entropy."""
    return _CrossEntropy.apply(logits_MV, targets_M, weights_M)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        logits = logits.contiguous()
        wide = torch.promote_types(logits.dtype, torch.float32)
        loss, lse = (torch.empty(len(logits), dtype=wide, device=logits.device) for _ in range(2))
        if len(logits):
            _loss_forward[(len(logits),)](
                logits, targets, loss, lse, logits.shape[1], _block(logits)
            )
        weights = None if weights is None else weights.to(wide).contiguous()
        ctx.save_for_backward(logits, targets, weights, lse)
        return loss.sum() if weights is None else loss @ weights

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, weights, lse = ctx.saved_tensors
        out = torch.empty_like(logits)
        if len(logits):
            grid = (len(logits), triton.cdiv(logits.shape[1], _block(logits)))
            any_weights = lse if weights is None else weights  # read only if there are weights
            tensors = (logits, targets, any_weights, lse, grad, out)
            _loss_backward[grid](
                *tensors, logits.shape[1], _block(logits), WEIGHTED=weights is not None
            )
        return out, None, None


def _block(logits: Tensor) -> int:
    return min(BLOCK, triton.next_power_of_2(logits.shape[1]))
