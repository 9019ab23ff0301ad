"""Layer 1's attention as one scan over keys: all prefixes of a row in one pass, n^3 scores never exist.

Defined by `running_attention` in entp/engine/running.py. For token i, z_j the log-sum-exp and o_j the output over keys 0..j:

    forward   beta_j = exp(s_ij - z_j),  o_j = o_{j-1} + beta_j (v_j - o_{j-1})            written where prefix j + 1 is asked
    backward  Q_j = g_j + exp(z_j - z_{j+1}) Q_{j+1},  c_j = g_j . o_j + exp(z_j - z_{j+1}) c_{j+1}
              ds_ij = beta_j (Q_j . v_j - c_j),  dv_j += beta_j Q_j

Every exponent is at most 0. Sums over tokens i are written per tile of tokens and added up afterwards: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from entp.engine.layout import Packing

FORWARD, BACKWARD = 8, 16
"""Tokens of a tile: one warp each."""


@triton.jit
def _scan_forward(q, k, v, row_of, out, z_out, H, T, d, TOKENS: tl.constexpr, DP: tl.constexpr):
    """Tokens of one tile of one head of one sequence over all keys."""
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // H, bh % H
    i, e = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DP)
    kind = z_out.dtype.element_ty
    here = (i < T)[:, None] & (e < d)[None, :]
    qt = tl.load(q + (bh * T + i)[:, None] * d + e[None, :], mask=here, other=0.0)
    z = tl.full((TOKENS,), float("-inf"), kind)
    o = tl.zeros((TOKENS, DP), kind)
    for j in range(0, T):
        kt = tl.load(k + (bh * T + j) * d + e, mask=e < d, other=0.0).to(kind)
        vt = tl.load(v + (bh * T + j) * d + e, mask=e < d, other=0.0).to(kind)
        s = tl.sum(qt * kt[None, :], 1)
        top = tl.maximum(z, s)
        z = top + tl.log(tl.exp(z - top) + tl.exp(s - top))
        o += tl.exp(s - z)[:, None] * (vt[None, :] - o)
        tl.store(z_out + (bh * T + i) * T + j, z, mask=i < T)
        row = tl.load(row_of + b * T + j).to(tl.int64)
        if row >= 0:
            at = (row + i)[:, None] * (H * d) + h * d + e[None, :]
            tl.store(out + at, o.to(out.dtype.element_ty), mask=here & (i <= j)[:, None])


@triton.jit
def _scan_backward(q, k, v, row_of, out, z_in, grad, dq, dk, dv, H, T, d, TILES, TOKENS: tl.constexpr, DP: tl.constexpr):
    """The same tile from the last key to the first; dk and dv are this tile's share."""
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // H, bh % H
    i, e = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DP)
    kind = z_in.dtype.element_ty
    here = (i < T)[:, None] & (e < d)[None, :]
    qt = tl.load(q + (bh * T + i)[:, None] * d + e[None, :], mask=here, other=0.0)
    later = tl.load(z_in + (bh * T + i) * T + T - 1, mask=i < T, other=0.0)
    grad_sum = tl.zeros((TOKENS, DP), kind)
    inner = tl.zeros((TOKENS,), kind)
    dqt = tl.zeros((TOKENS, DP), kind)
    for back in range(0, T):
        j = T - 1 - back
        z = tl.load(z_in + (bh * T + i) * T + j, mask=i < T, other=0.0)
        decay = tl.exp(z - later)
        grad_sum, inner, later = grad_sum * decay[:, None], inner * decay, z
        row = tl.load(row_of + b * T + j).to(tl.int64)
        if row >= 0:
            at = (row + i)[:, None] * (H * d) + h * d + e[None, :]
            g = tl.load(grad + at, mask=here & (i <= j)[:, None], other=0.0).to(kind)
            o = tl.load(out + at, mask=here & (i <= j)[:, None], other=0.0).to(kind)
            grad_sum += g
            inner += tl.sum(g * o, 1)
        kt = tl.load(k + (bh * T + j) * d + e, mask=e < d, other=0.0).to(kind)
        vt = tl.load(v + (bh * T + j) * d + e, mask=e < d, other=0.0).to(kind)
        beta = tl.where(i < T, tl.exp(tl.sum(qt * kt[None, :], 1) - z), 0.0)
        ds = beta * (tl.sum(grad_sum * vt[None, :], 1) - inner)
        dqt += ds[:, None] * kt[None, :]
        share = ((bh * TILES + tile) * T + j) * d + e
        tl.store(dk + share, tl.sum(ds[:, None] * qt, 0), mask=e < d)
        tl.store(dv + share, tl.sum(beta[:, None] * grad_sum, 0), mask=e < d)
    tl.store(dq + (bh * T + i)[:, None] * d + e[None, :], dqt, mask=here)


def running_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """As entp.engine.running.running_attention: (N, H d) from q, k, v (B, H, T, d)."""
    return _RunningAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), packing, scale)


class _RunningAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
        batch, heads, time, size = q.shape
        row_of = packing.row_of
        out = v.new_empty(packing.rows, heads * size)
        wide = torch.promote_types(q.dtype, torch.float32)
        q = q.to(wide) * scale  # here and not in the kernel, which would take the scale as fp32
        z = torch.empty(batch, heads, time, time, dtype=wide, device=q.device)
        grid = (batch * heads, triton.cdiv(time, FORWARD))
        _scan_forward[grid](q, k, v, row_of, out, z, heads, time, size, **_tiles(FORWARD, size))
        ctx.save_for_backward(q, k, v, row_of, out, z)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, row_of, out, z = ctx.saved_tensors
        batch, heads, time, size = q.shape
        tiles = triton.cdiv(time, BACKWARD)
        dq = torch.empty_like(q)
        dk, dv = (torch.empty(batch, heads, tiles, time, size, dtype=z.dtype, device=q.device) for _ in range(2))
        shape, grad = (heads, time, size, tiles), grad.contiguous()
        _scan_backward[(batch * heads, tiles)](
            q, k, v, row_of, out, z, grad.contiguous(), dq, dk, dv, *shape, **_tiles(BACKWARD, size)
        )
        return (dq * ctx.scale).to(k.dtype), dk.sum(2).to(k.dtype), dv.sum(2).to(v.dtype), None, None


def _tiles(tokens: int, size: int) -> dict[str, int]:
    return {"TOKENS": tokens, "DP": triton.next_power_of_2(size), "num_warps": 1}
