"""The last layer's attention: one query per prefix and head over the prefix's rows, which are keys and values at once.

Defined by `packed.query_attention`. With s = x q, a = softmax(s) inside each prefix, c = a^T x and dc the gradient of c:

    ds = a (x dc - dc c)      dq = ds^T x      dx = a dc + ds q

A program owns a prefix and reads its rows once, all heads together. No atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from entp.engine.layout import Packing


@triton.jit
def _query_forward(x, q, bounds, out, lse, D, H, ROWS: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    start, end = tl.load(bounds + p).to(tl.int64), tl.load(bounds + p + 1).to(tl.int64)
    heads, cols = tl.arange(0, HP), tl.arange(0, DP)
    wide = lse.dtype.element_ty
    at = (p * H + heads)[:, None] * D + cols[None, :]
    seen = (heads < H)[:, None] & (cols < D)[None, :]
    qt = tl.load(q + at, mask=seen, other=0.0).to(x.dtype.element_ty)
    top = tl.full((HP,), float("-inf"), wide)
    total = tl.zeros((HP,), wide)
    acc = tl.zeros((HP, DP), wide)
    for base in range(start, end, ROWS):
        rows = base + tl.arange(0, ROWS)
        xt = tl.load(x + rows[:, None] * D + cols[None, :], mask=(rows < end)[:, None] & (cols < D)[None, :], other=0.0)
        s = tl.dot(qt, tl.trans(xt), input_precision="ieee", out_dtype=wide)
        s = tl.where((rows < end)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        weight, decay = tl.exp(s - higher[:, None]), tl.exp(top - higher)
        total, top = total * decay + tl.sum(weight, 1), higher
        acc = acc * decay[:, None] + tl.dot(weight.to(xt.dtype), xt, input_precision="ieee", out_dtype=wide)
    tl.store(out + at, acc / total[:, None], mask=seen)
    tl.store(lse + p * H + heads, top + tl.log(total), mask=heads < H)


@triton.jit
def _query_backward(x, q, bounds, lse, inner, grad, dx, dq, D, H, ROWS: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    start, end = tl.load(bounds + p).to(tl.int64), tl.load(bounds + p + 1).to(tl.int64)
    heads, cols = tl.arange(0, HP), tl.arange(0, DP)
    wide = lse.dtype.element_ty
    at = (p * H + heads)[:, None] * D + cols[None, :]
    seen = (heads < H)[:, None] & (cols < D)[None, :]
    qt = tl.load(q + at, mask=seen, other=0.0).to(x.dtype.element_ty)
    gt = tl.load(grad + at, mask=seen, other=0.0).to(x.dtype.element_ty)
    z = tl.load(lse + p * H + heads, mask=heads < H, other=float("inf"))
    delta = tl.load(inner + p * H + heads, mask=heads < H, other=0.0)
    acc = tl.zeros((HP, DP), wide)
    for base in range(start, end, ROWS):
        rows = base + tl.arange(0, ROWS)
        real = (rows < end)[:, None] & (cols < D)[None, :]
        xt = tl.load(x + rows[:, None] * D + cols[None, :], mask=real, other=0.0)
        s = tl.dot(xt, tl.trans(qt), input_precision="ieee", out_dtype=wide)
        weight = tl.where((rows < end)[:, None], tl.exp(s - z[None, :]), 0.0)
        pulled = tl.dot(xt, tl.trans(gt), input_precision="ieee", out_dtype=wide)
        ds = (weight * (pulled - delta[None, :])).to(xt.dtype)
        acc += tl.dot(tl.trans(ds), xt, input_precision="ieee", out_dtype=wide)
        back = tl.dot(weight.to(xt.dtype), gt, input_precision="ieee", out_dtype=wide)
        back += tl.dot(ds, qt, input_precision="ieee", out_dtype=wide)
        tl.store(dx + rows[:, None] * D + cols[None, :], back.to(dx.dtype.element_ty), mask=real)
    tl.store(dq + at, acc, mask=seen)


def query_attention(x_ND: Tensor, q_MHD: Tensor, packing: Packing) -> Tensor:
    """As packed.query_attention: contexts (M, H, D) of one scaled query per prefix and head over the prefix's rows."""
    return _QueryAttention.apply(x_ND, q_MHD.contiguous(), packing)


class _QueryAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, q: Tensor, packing: Packing) -> Tensor:
        context, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        _query_forward[(len(q),)](x, q, packing.bounds, context, lse, q.shape[2], q.shape[1], **_tiles(q))
        ctx.save_for_backward(x, q, context, lse)
        ctx.packing = packing
        return context

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, q, context, lse = ctx.saved_tensors
        grad = grad.contiguous()
        dx, dq, inner = torch.empty_like(x), torch.empty_like(q), (grad * context).sum(-1)
        sizes = (q.shape[2], q.shape[1])
        _query_backward[(len(q),)](x, q, ctx.packing.bounds, lse, inner, grad, dx, dq, *sizes, **_tiles(q))
        return dx, dq, None


def _tiles(q: Tensor) -> dict[str, int]:
    padded = max(16, triton.next_power_of_2(q.shape[2]))
    heads = max(16, triton.next_power_of_2(q.shape[1]))
    return {"ROWS": 16, "DP": padded, "HP": heads, "num_warps": 2 if padded <= 512 else 4}
