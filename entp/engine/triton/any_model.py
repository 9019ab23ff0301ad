"""Attention of any model of protocol.py on packed rows: q, k and v as its own `project` made them.

These kernels read no weights. Layer 1 and the middle layers take those of online_softmax.py and
attention.py, on q, k and v side by side; the plain functions that define them are in packed.py. The
last layer has one query per prefix, with a kernel of its own. With s = scale k q, a = softmax(s)
inside each prefix, o = a^T v and g the gradient of o:

    ds = a (v g - o g)      dq = scale ds^T k      dk = scale ds q      dv = a g

A program owns a head of a prefix and reads its keys and values once. No atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from entp.engine.layout import Packing
from entp.engine.triton import attention, online_softmax
from entp.engine.triton.rows import KINDS

ROWS = 32
"""Keys of a tile."""


@triton.jit
def _one_query_forward(
    q, k, v, starts, ends, out, lse, H, d, K_ROW, K_HEAD, V_ROW, V_HEAD, SCALE: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    p, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts + p).to(tl.int64), tl.load(ends + p).to(tl.int64)
    e = tl.arange(0, DP)
    at = (p * H + h) * d + e
    query = tl.load(q + at, mask=e < d, other=0.0).to(WIDE) * SCALE
    top = tl.full((1,), float("-inf"), WIDE)
    total, acc = tl.zeros((1,), WIDE), tl.zeros((DP,), WIDE)
    for base in range(start, end, ROWS):
        rows = base + tl.arange(0, ROWS)
        real = (rows < end)[:, None] & (e < d)[None, :]
        keys = tl.load(k + rows[:, None] * K_ROW + (h * K_HEAD + e)[None, :], mask=real, other=0.0)
        values = tl.load(
            v + rows[:, None] * V_ROW + (h * V_HEAD + e)[None, :], mask=real, other=0.0
        )
        s = tl.sum(keys.to(WIDE) * query[None, :], 1)
        s = tl.where(rows < end, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        weight, decay = tl.exp(s - higher), tl.exp(top - higher)
        total, top = total * decay + tl.sum(weight, 0), higher
        acc = acc * decay + tl.sum(weight[:, None] * values.to(WIDE), 0)
    tl.store(out + at, (acc / total).to(out.dtype.element_ty), mask=e < d)
    tl.store(lse + p * H + h + tl.arange(0, 1), top + tl.log(total))


@triton.jit
def _one_query_backward(
    q, k, v, starts, ends, out, lse, grad, dq, dk, dv, H, d, K_ROW, K_HEAD, V_ROW, V_HEAD,
    SCALE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    p, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts + p).to(tl.int64), tl.load(ends + p).to(tl.int64)
    e = tl.arange(0, DP)
    at = (p * H + h) * d + e
    query = tl.load(q + at, mask=e < d, other=0.0).to(WIDE) * SCALE
    g = tl.load(grad + at, mask=e < d, other=0.0).to(WIDE)
    inner = tl.sum(g * tl.load(out + at, mask=e < d, other=0.0).to(WIDE), 0)
    z = tl.load(lse + p * H + h)
    acc = tl.zeros((DP,), WIDE)
    for base in range(start, end, ROWS):
        rows = base + tl.arange(0, ROWS)
        real = (rows < end)[:, None] & (e < d)[None, :]
        keys = tl.load(k + rows[:, None] * K_ROW + (h * K_HEAD + e)[None, :], mask=real, other=0.0)
        values = tl.load(
            v + rows[:, None] * V_ROW + (h * V_HEAD + e)[None, :], mask=real, other=0.0
        )
        keys = keys.to(WIDE)
        weight = tl.where(rows < end, tl.exp(tl.sum(keys * query[None, :], 1) - z), 0.0)
        ds = weight * (tl.sum(values.to(WIDE) * g[None, :], 1) - inner)
        acc += tl.sum(ds[:, None] * keys, 0)
        to = (rows[:, None] * H + h) * d + e[None, :]
        tl.store(dk + to, (ds[:, None] * query[None, :]).to(dk.dtype.element_ty), mask=real)
        tl.store(dv + to, (weight[:, None] * g[None, :]).to(dv.dtype.element_ty), mask=real)
    tl.store(dq + at, (acc * SCALE).to(dq.dtype.element_ty), mask=e < d)


def first_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """As online_softmax.running_attention: q, k, v (B, T, H, d) of tokens to rows (N, H d)."""
    qkv = torch.cat([x.flatten(0, 1).flatten(1) for x in (q, k, v)], 1)
    return online_softmax.running_attention(qkv, _no_bias(qkv), packing, q.shape[-2], scale)


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """Full attention inside each prefix: q, k, v (N, H, d) to (N, H d)."""
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    return attention.prefix_attention(qkv, _no_bias(qkv), packing, q.shape[1], scale)


def _no_bias(qkv: Tensor) -> Tensor:
    """The bias that the kernels take for its gradient and its type: here it is the model's own."""
    wide = torch.promote_types(qkv.dtype, torch.float32)
    return torch.zeros(qkv.shape[1], dtype=wide, device=qkv.device)


def last_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """One query per prefix over its rows: q (M, H, d), k and v (N, H, d) to (M, H d)."""
    return _LastAttention.apply(q, k, v, packing, scale)


class _LastAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> Tensor:
        q, k, v = q.contiguous(), _rows(k), _rows(v)
        count, heads, size = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), torch.empty(count, heads, dtype=wide, device=q.device)
        ctx.fixed = {
            "SCALE": scale,
            "WIDE": KINDS[wide],
            "ROWS": ROWS,
            "DP": triton.next_power_of_2(size),
            "num_warps": 1,
        }
        ctx.sizes = (heads, size, *k.stride()[:2], *v.stride()[:2])
        where = (q, k, v, packing.starts, packing.ends)
        _one_query_forward[(count, heads)](*where, out, lse, *ctx.sizes, **ctx.fixed)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing = packing
        return out.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        where = (q, k, v, ctx.packing.starts, ctx.packing.ends, out, lse, grad.contiguous())
        _one_query_backward[q.shape[:2]](*where, dq, dk, dv, *ctx.sizes, **ctx.fixed)
        return dq, dk, dv, None, None


def _rows(x: Tensor) -> Tensor:
    """(N, H, d) whose features stand side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
