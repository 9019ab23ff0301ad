"""The last layer's attention: one query per prefix over its rows, all prefixes in a handful of launches.

Defined by `packed.query_attention`. With s = x q, a = softmax(s) inside each prefix and c = a^T x:

    forward   s_nh = x_n . q_ph                      row_dot
              c_ph = sum_n a_nh x_n                  segment_sum
    backward  da_nh = x_n . dc_ph                    row_dot
              ds_nh = a_nh (da_nh - dc_ph . c_ph)
              dq_ph = sum_n ds_nh x_n                segment_sum
              dx_n  = sum_h a_nh dc_ph + ds_nh q_ph  row_expand

p is the prefix of row n, h a head. Scores are N H numbers, few enough to write out, so prefixes of any length stream over rows.
No atomics: every output is written by one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from entp.engine.layout import Packing

ROWS = 32
COLUMNS = 64


@triton.jit
def _row_dot(x, q, first_row, out, lse, D, H, ROWS: tl.constexpr, COLS: tl.constexpr, HP: tl.constexpr, SOFTMAX: tl.constexpr):
    """One prefix: out[n, h] = x[n] . q[p, h] for its rows; with SOFTMAX also lse[p, h] = log sum_n exp out[n, h]."""
    p = tl.program_id(0).to(tl.int64)
    start, end = tl.load(first_row + p), tl.load(first_row + p + 1)
    heads = tl.arange(0, HP)
    top = tl.full((HP,), float("-inf"), out.dtype.element_ty)
    total = tl.zeros((HP,), out.dtype.element_ty)
    for base in range(start, end, ROWS):
        rows = base + tl.arange(0, ROWS)
        acc = tl.zeros((ROWS, HP), out.dtype.element_ty)
        for column in range(0, D, COLS):
            cols = column + tl.arange(0, COLS)
            xt = tl.load(x + rows[:, None] * D + cols[None, :], mask=(rows < end)[:, None] & (cols < D)[None, :], other=0.0)
            qt = tl.load(
                q + (p * H + heads)[None, :] * D + cols[:, None], mask=(heads < H)[None, :] & (cols < D)[:, None], other=0.0
            )
            acc += tl.dot(xt, qt, input_precision="ieee", out_dtype=acc.dtype)
        real = (rows < end)[:, None] & (heads < H)[None, :]
        tl.store(out + rows[:, None] * H + heads[None, :], acc, mask=real)
        if SOFTMAX:
            acc = tl.where((rows < end)[:, None], acc, float("-inf"))
            higher = tl.maximum(top, tl.max(acc, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(acc - higher[None, :]), 0)
            top = higher
    if SOFTMAX:
        tl.store(lse + p * H + heads, top + tl.log(total), mask=heads < H)


@triton.jit
def _segment_sum(w, x, first_row, out, D, H, ROWS: tl.constexpr, COLS: tl.constexpr, HP: tl.constexpr):
    """One prefix, some columns: out[p, h] = sum over its rows of w[n, h] x[n]."""
    p = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    start, end = tl.load(first_row + p), tl.load(first_row + p + 1)
    heads = tl.arange(0, HP)
    acc = tl.zeros((HP, COLS), out.dtype.element_ty)
    for base in range(start, end, ROWS):
        rows = base + tl.arange(0, ROWS)
        wt = tl.load(w + rows[None, :] * H + heads[:, None], mask=(rows < end)[None, :] & (heads < H)[:, None], other=0.0)
        xt = tl.load(x + rows[:, None] * D + cols[None, :], mask=(rows < end)[:, None] & (cols < D)[None, :], other=0.0)
        acc += tl.dot(wt, xt, input_precision="ieee", out_dtype=acc.dtype)
    tl.store(out + (p * H + heads)[:, None] * D + cols[None, :], acc, mask=(heads < H)[:, None] & (cols < D)[None, :])


@triton.jit
def _row_expand(w1, y1, w2, y2, first_row, out, D, H, ROWS: tl.constexpr, COLS: tl.constexpr, HP: tl.constexpr):
    """One prefix, some columns: out[n] = sum_h w1[n, h] y1[p, h] + w2[n, h] y2[p, h] for its rows."""
    p = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    start, end = tl.load(first_row + p), tl.load(first_row + p + 1)
    heads = tl.arange(0, HP)
    at = (p * H + heads)[:, None] * D + cols[None, :]
    seen = (heads < H)[:, None] & (cols < D)[None, :]
    a, b = tl.load(y1 + at, mask=seen, other=0.0), tl.load(y2 + at, mask=seen, other=0.0)
    for base in range(start, end, ROWS):
        rows = base + tl.arange(0, ROWS)
        weight_at = rows[:, None] * H + heads[None, :]
        real = (rows < end)[:, None] & (heads < H)[None, :]
        acc = tl.dot(tl.load(w1 + weight_at, mask=real, other=0.0), a, input_precision="ieee", out_dtype=out.dtype.element_ty)
        acc += tl.dot(tl.load(w2 + weight_at, mask=real, other=0.0), b, input_precision="ieee", out_dtype=out.dtype.element_ty)
        tl.store(out + rows[:, None] * D + cols[None, :], acc, mask=(rows < end)[:, None] & (cols < D)[None, :])


def query_attention(x_ND: Tensor, q_MHD: Tensor, packing: Packing) -> Tensor:
    """As packed.query_attention: contexts (M, H, D) of one scaled query per prefix and head over the prefix's rows."""
    return _QueryAttention.apply(x_ND.contiguous(), q_MHD.contiguous(), packing)


class _QueryAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, q: Tensor, packing: Packing) -> Tensor:
        first = packing.bounds().long()
        scores, lse = row_dot(x, q, first, softmax=True)
        assert lse is not None
        prefix = packing.row_prefix()
        weight = torch.exp(scores - lse[prefix])
        context = segment_sum(weight, x, first)
        ctx.save_for_backward(x, q, weight, context, first, prefix)
        return context

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, q, weight, context, first, prefix = ctx.saved_tensors
        grad = grad.contiguous()
        d_weight, _ = row_dot(x, grad, first)
        d_score = weight * (d_weight - (grad * context).sum(-1)[prefix])
        d_x = torch.empty_like(x)
        _row_expand[_grid(q, wide=True)](weight, grad, d_score, q, first, d_x, *_sizes(q), **_tiles(q))
        return d_x, segment_sum(d_score, x, first), None


def row_dot(x: Tensor, q: Tensor, first: Tensor, softmax: bool = False) -> tuple[Tensor, Tensor | None]:
    """(N, H) products of each row with its prefix's H vectors, and their log-sum-exp (M, H) if asked for."""
    out = x.new_empty(x.shape[0], q.shape[1])
    lse = x.new_empty(q.shape[:2])
    _row_dot[_grid(q)](x, q, first, out, lse, *_sizes(q), **_tiles(q), SOFTMAX=softmax)
    return out, lse if softmax else None


def segment_sum(w: Tensor, x: Tensor, first: Tensor) -> Tensor:
    """(M, H, D): the rows of each prefix added up with weights (N, H)."""
    out = x.new_empty(len(first) - 1, w.shape[1], x.shape[1])
    _segment_sum[_grid(out, wide=True)](w.contiguous(), x, first, out, *_sizes(out), **_tiles(out))
    return out


def _grid(q: Tensor, wide: bool = False) -> tuple[int, ...]:
    return (q.shape[0], triton.cdiv(q.shape[2], COLUMNS)) if wide else (q.shape[0],)


def _sizes(q: Tensor) -> tuple[int, int]:
    return q.shape[2], q.shape[1]


def _tiles(q: Tensor) -> dict[str, int]:
    return {"ROWS": ROWS, "COLS": COLUMNS, "HP": max(16, triton.next_power_of_2(q.shape[1]))}
