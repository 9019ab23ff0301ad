"""Cross entropy over a large vocabulary without a copy of the logits in fp32.

Defined by `plain_cross_entropy`. The backward pass reads the logits once more: softmax(logits) - onehot(target), times the
gradient, in the logits' own type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def plain_cross_entropy(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    """Summed over rows, in fp32 or float64."""
    return F.cross_entropy(logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)), targets_M, reduction="sum")


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
        total = total * tl.where(same, 0.0, tl.exp(top - higher)) + tl.where(same, 0.0, tl.exp(value - higher))
        top = higher
    highest = tl.max(top, 0)
    z = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(lse + row, z)
    tl.store(loss + row, z - tl.load(logits + row * V + tl.load(targets + row)).to(wide))


@triton.jit
def _loss_backward(logits, targets, lse, grad, out, V, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z, g = tl.load(lse + row), tl.load(grad)
    value = tl.load(logits + row * V + cols, mask=cols < V, other=float("-inf")).to(lse.dtype.element_ty)
    value = g * (tl.exp(value - z) - tl.where(cols == tl.load(targets + row), 1.0, 0.0))
    tl.store(out + row * V + cols, value.to(out.dtype.element_ty), mask=cols < V)


def cross_entropy(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    """As plain_cross_entropy."""
    return _CrossEntropy.apply(logits_MV, targets_M)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.contiguous()
        wide = torch.promote_types(logits.dtype, torch.float32)
        loss, lse = (torch.empty(len(logits), dtype=wide, device=logits.device) for _ in range(2))
        if len(logits):
            _loss_forward[(len(logits),)](logits, targets, loss, lse, logits.shape[1], _block(logits))
        ctx.save_for_backward(logits, targets, lse)
        return loss.sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets, lse = ctx.saved_tensors
        out = torch.empty_like(logits)
        if len(logits):
            grid = (len(logits), triton.cdiv(logits.shape[1], _block(logits)))
            _loss_backward[grid](logits, targets, lse, grad, out, logits.shape[1], _block(logits))
        return out, None


def _block(logits: Tensor) -> int:
    return min(BLOCK, triton.next_power_of_2(logits.shape[1]))
