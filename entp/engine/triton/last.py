"""The last layer's attention: one query per prefix and head over rows that are keys and values.

Defined by `packed.query_attention`. With s = scale x q, a = softmax(s) inside each prefix, c = a^T
x and dc the gradient of c:

    ds = a (x dc - dc c)      dq = scale ds^T x      dx = a dc + scale ds q

A program owns a prefix and reads its rows once, all heads together. No atomics. `LastAttention`
puts the matrix products around it, by hand: autograd would take four times as many launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from entp.engine.layout import Layout
from entp.engine.triton.linear import weight_gradient
from entp.engine.triton.rows import column_sums, fold, fold_backward


@triton.jit(do_not_specialize=["M", "H"])
def _query_forward(
    x,
    q,
    starts,
    ends,
    out,
    lse,
    M,
    D,
    H,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    DP: tl.constexpr,
    HP: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts + p).to(tl.int64), tl.load(ends + p).to(tl.int64)
    heads, cols = tl.arange(0, HP), tl.arange(0, DP)
    wide = lse.dtype.element_ty
    at = (heads * M + p)[:, None] * D + cols[None, :]
    seen = (heads < H)[:, None] & (cols < D)[None, :]
    qt = tl.load(q + at, mask=seen, other=0.0)
    top = tl.full((HP,), float("-inf"), wide)
    total = tl.zeros((HP,), wide)
    acc = tl.zeros((HP, DP), wide)
    for base in range(start, end, ROWS):
        rows = base + tl.arange(0, ROWS)
        xt = tl.load(
            x + rows[:, None] * D + cols[None, :],
            mask=(rows < end)[:, None] & (cols < D)[None, :],
            other=0.0,
        )
        s = tl.dot(qt, tl.trans(xt), input_precision="ieee", out_dtype=wide) * SCALE
        s = tl.where((rows < end)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        weight, decay = tl.exp(s - higher[:, None]), tl.exp(top - higher)
        total, top = total * decay + tl.sum(weight, 1), higher
        acc = acc * decay[:, None] + tl.dot(
            weight.to(xt.dtype), xt, input_precision="ieee", out_dtype=wide
        )
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=seen)
    tl.store(lse + heads * M + p, top + tl.log(total), mask=heads < H)


@triton.jit(do_not_specialize=["M", "H"])
def _query_backward(
    x, q, starts, ends, lse, context, grad, dx, dq, M, D, H, SCALE: tl.constexpr,
    ROWS: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts + p).to(tl.int64), tl.load(ends + p).to(tl.int64)
    heads, cols = tl.arange(0, HP), tl.arange(0, DP)
    wide = lse.dtype.element_ty
    at = (heads * M + p)[:, None] * D + cols[None, :]
    seen = (heads < H)[:, None] & (cols < D)[None, :]
    qt, gt = tl.load(q + at, mask=seen, other=0.0), tl.load(grad + at, mask=seen, other=0.0)
    delta = tl.sum(gt.to(wide) * tl.load(context + at, mask=seen, other=0.0).to(wide), 1)
    z = tl.load(lse + heads * M + p, mask=heads < H, other=float("inf"))
    acc = tl.zeros((HP, DP), wide)
    for base in range(start, end, ROWS):
        rows = base + tl.arange(0, ROWS)
        real = (rows < end)[:, None] & (cols < D)[None, :]
        xt = tl.load(x + rows[:, None] * D + cols[None, :], mask=real, other=0.0)
        s = tl.dot(xt, tl.trans(qt), input_precision="ieee", out_dtype=wide) * SCALE
        weight = tl.where((rows < end)[:, None], tl.exp(s - z[None, :]), 0.0)
        pulled = tl.dot(xt, tl.trans(gt), input_precision="ieee", out_dtype=wide)
        ds = (weight * (pulled - delta[None, :]) * SCALE).to(xt.dtype)
        acc += tl.dot(tl.trans(ds), xt, input_precision="ieee", out_dtype=wide)
        back = tl.dot(weight.to(xt.dtype), gt, input_precision="ieee", out_dtype=wide)
        back += tl.dot(ds, qt, input_precision="ieee", out_dtype=wide)
        tl.store(dx + rows[:, None] * D + cols[None, :], back.to(dx.dtype.element_ty), mask=real)
    tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=seen)


def query_forward(
    x_ND: Tensor, q_HMD: Tensor, packing: Layout, scale: float, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Contexts (H, M, D) and log-sum-exps (H, M).

    As packed.query_attention, which has heads second and takes scaled queries.
    """
    heads, count, width = q_HMD.shape
    context = torch.empty_like(q_HMD)
    lse = torch.empty(heads, count, dtype=wide, device=q_HMD.device)
    tiles = _tiles(width, heads, backward=False)
    _query_forward[(count,)](
        x_ND, q_HMD, packing.starts, packing.ends, context, lse, count, width, heads, scale, **tiles
    )
    return context, lse


def query_backward(
    x_ND: Tensor,
    q_HMD: Tensor,
    packing: Layout,
    scale: float,
    lse: Tensor,
    context: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows (N, D) and the queries (H, M, D)."""
    heads, count, width = q_HMD.shape
    dx, dq = torch.empty_like(x_ND), torch.empty_like(q_HMD)
    tiles = _tiles(width, heads, backward=True)
    inputs = (x_ND, q_HMD, packing.starts, packing.ends, lse, context, grad)
    _query_backward[(count,)](*inputs, dx, dq, count, width, heads, scale, **tiles)
    return dx, dq


def _tiles(width: int, heads: int, *, backward: bool) -> dict[str, int]:
    """Tiles and warps as measured on an H200: the backward pass holds twice as much."""
    padded = max(16, triton.next_power_of_2(width))
    warps = min(4, max(1, padded // 256)) * (2 if backward else 1)
    return {
        "ROWS": 16,
        "DP": padded,
        "HP": max(16, triton.next_power_of_2(heads)),
        "num_warps": min(4, warps),
        "num_stages": 2,
    }


class LastAttention(torch.autograd.Function):
    """Attended rows (M, D), before the output projection.

    Takes the normed rows x (N, D), those at the end of each prefix (M, D), the q, k, v matrix and
    bias, the norm's gain and shift (or None), the packing, the number of heads and the scale. Per
    head, q k_i = (W_K^T q) x_i + a constant, which softmax ignores, and sum_i a_i v_i = W_V (sum_i
    a_i x_i) + b_V: keys and values of the N rows are never computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        last: Tensor,
        w: Tensor,
        bias: Tensor,
        gain: Tensor | None,
        shift: Tensor | None,
        packing: Layout,
        heads: int,
        scale: float,
    ) -> Tensor:
        width = last.shape[1]
        half, folded = w.to(x.dtype), bias
        if gain is not None:
            assert shift is not None
            half, folded = fold(w, bias, gain, shift, x.dtype)
        _, w_k, w_v = half.view(3, heads, -1, width)
        b_q, _, b_v = folded.to(x.dtype).view(3, heads, 1, -1)
        q = torch.addmm(b_q.flatten(), last, half[:width].T)
        absorbed = torch.bmm(_by_head(q, heads), w_k)
        context, lse = query_forward(x, absorbed, packing, scale, bias.dtype)
        ctx.save_for_backward(x, last, w, gain, shift, half, q, absorbed, context, lse)
        ctx.packing, ctx.heads, ctx.scale = packing, heads, scale
        return _by_row(torch.baddbmm(b_v, context, w_v.mT))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, last, w, gain, shift, half, q, absorbed, context, lse = ctx.saved_tensors
        heads, width = ctx.heads, last.shape[1]
        _, w_k, w_v = half.view(3, heads, -1, width)
        grad = grad.contiguous()
        g, kind = _by_head(grad, heads), w.dtype
        dx, d_absorbed = query_backward(
            x, absorbed, ctx.packing, ctx.scale, lse, context, torch.bmm(g, w_v)
        )
        dq = _by_row(torch.bmm(d_absorbed, w_k.mT))
        dw_k, dw_v = _outer(_by_head(q, heads), d_absorbed, kind), _outer(g, context, kind)
        dw = torch.cat([weight_gradient(dq, last, kind), dw_k.flatten(0, 1), dw_v.flatten(0, 1)])
        sums = column_sums(dq, kind), column_sums(grad, kind)
        db = torch.cat([sums[0], torch.zeros_like(sums[0]), sums[1]])
        d_gain, d_shift = None, None
        if gain is not None:
            dw, d_gain, d_shift = fold_backward(dw, db, w, gain, shift)
        return dx, dq @ half[:width], dw, db, d_gain, d_shift, None, None, None


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """(M, D) as (H, M, d)."""
    return rows.view(len(rows), heads, -1).transpose(0, 1)


def _by_row(heads_HMd: Tensor) -> Tensor:
    """(H, M, d) as (M, D), in order in memory, as kernels read it: where d is 1 a reshape is a
    transposed view."""
    return heads_HMd.transpose(0, 1).flatten(1).contiguous()


def _outer(a_HMd: Tensor, b_HMD: Tensor, kind: torch.dtype) -> Tensor:
    """a^T b for each head, (H, d, D), in the weights' type."""
    if a_HMd.is_cuda and a_HMd.dtype != kind:
        return torch.bmm(a_HMd.mT, b_HMD, out_dtype=kind)
    return torch.bmm(a_HMd.mT, b_HMD).to(kind)
