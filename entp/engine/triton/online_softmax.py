"""Layer 1's attention as one scan over keys: all prefixes of a row in one pass.

Defined by `running_attention` in entp/engine/online_softmax.py. For token i, z_j the log-sum-exp
and o_j the output over keys 0..j, which is written where prefix j + 1 is in the packing:

    forward   beta_j = exp(s_ij - z_j),  o_j = o_{j-1} + beta_j (v_j - o_{j-1})
    backward  Q_j = g_j + exp(z_j - z_{j+1}) Q_{j+1},  c_j = g_j . o_j + exp(z_j - z_{j+1}) c_{j+1}
              ds_ij = beta_j (Q_j . v_j - c_j),  dv_j += beta_j Q_j

Every exponent is at most 0. Sums over tokens i are written per tile of tokens and added up
afterwards: no atomics. q, k, v come as rows (B T, 3 D) with their bias in them; its gradient is
returned here, as in attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from entp.engine.layout import Packing
from entp.engine.triton.rows import KINDS, column_sums

TOKENS = 8
"""Tokens of a tile: one warp each."""


@triton.jit(do_not_specialize=["H", "T"])
def _scan_forward(
    qkv,
    row_of,
    out,
    z_out,
    H,
    T,
    d,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    DP: tl.constexpr,
):
    """Tokens of one tile of one head of one sequence over all keys."""
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // H, bh % H
    i, e = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DP)
    here = (i < T)[:, None] & (e < d)[None, :]
    base = qkv + b * T * (3 * H * d) + h * d + e
    qt = tl.load(base[None, :] + i[:, None] * (3 * H * d), mask=here, other=0.0).to(WIDE) * SCALE
    z = tl.full((TOKENS,), float("-inf"), WIDE)
    o = tl.zeros((TOKENS, DP), WIDE)
    for j in range(0, T):
        kt = tl.load(base + j * (3 * H * d) + H * d, mask=e < d, other=0.0).to(WIDE)
        vt = tl.load(base + j * (3 * H * d) + 2 * H * d, mask=e < d, other=0.0).to(WIDE)
        row = tl.load(row_of + b * T + j) + tl.zeros((TOKENS,), tl.int32)
        s = tl.sum(qt * kt[None, :], 1)
        top = tl.maximum(z, s)
        z = top + tl.log(tl.exp(z - top) + tl.exp(s - top))
        o += tl.exp(s - z)[:, None] * (vt[None, :] - o)
        tl.store(z_out + (bh * T + i) * T + j, z, mask=i < T)
        at = (row.to(tl.int64) + i)[:, None] * (H * d) + h * d + e[None, :]
        tl.store(out + at, o.to(out.dtype.element_ty), mask=here & ((i <= j) & (row >= 0))[:, None])


@triton.jit(do_not_specialize=["H", "T", "TILES"])
def _scan_backward(
    qkv, row_of, out, z_in, grad, dqkv, dkv, H, T, d, TILES, SCALE: tl.constexpr,
    WIDE: tl.constexpr, TOKENS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The same tile from the last key to the first: dq, and this tile's share of dk and dv."""
    bh, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // H, bh % H
    i, e = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DP)
    here = (i < T)[:, None] & (e < d)[None, :]
    base = qkv + b * T * (3 * H * d) + h * d + e
    qt = tl.load(base[None, :] + i[:, None] * (3 * H * d), mask=here, other=0.0).to(WIDE) * SCALE
    later = tl.load(z_in + (bh * T + i) * T + T - 1, mask=i < T, other=0.0)
    grad_sum = tl.zeros((TOKENS, DP), WIDE)
    inner = tl.zeros((TOKENS,), WIDE)
    dqt = tl.zeros((TOKENS, DP), WIDE)
    for back in range(0, T):
        j = T - 1 - back
        row = tl.load(row_of + b * T + j) + tl.zeros((TOKENS,), tl.int32)
        at = (row.to(tl.int64) + i)[:, None] * (H * d) + h * d + e[None, :]
        real = here & ((i <= j) & (row >= 0))[:, None]
        g = tl.load(grad + at, mask=real, other=0.0).to(WIDE)
        o = tl.load(out + at, mask=real, other=0.0).to(WIDE)
        z = tl.load(z_in + (bh * T + i) * T + j, mask=i < T, other=0.0)
        kt = tl.load(base + j * (3 * H * d) + H * d, mask=e < d, other=0.0).to(WIDE)
        vt = tl.load(base + j * (3 * H * d) + 2 * H * d, mask=e < d, other=0.0).to(WIDE)
        decay = tl.exp(z - later)
        grad_sum, inner, later = grad_sum * decay[:, None] + g, inner * decay + tl.sum(g * o, 1), z
        beta = tl.where(i < T, tl.exp(tl.sum(qt * kt[None, :], 1) - z), 0.0)
        ds = beta * (tl.sum(grad_sum * vt[None, :], 1) - inner)
        dqt += ds[:, None] * kt[None, :]
        share = dkv + ((bh * TILES + tile) * T + j) * 2 * d + e
        tl.store(share, tl.sum(ds[:, None] * qt, 0), mask=e < d)
        tl.store(share + d, tl.sum(beta[:, None] * grad_sum, 0), mask=e < d)
    at = (b * T + i)[:, None] * (3 * H * d) + h * d + e[None, :]
    tl.store(dqkv + at, (dqt * SCALE).to(dqkv.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["H", "T", "TILES"])
def _add_tiles(dkv, dqkv, H, T, d, TILES, KEYS: tl.constexpr, DP: tl.constexpr):
    """dk and dv of some keys of one head of one sequence: the shares of all tiles."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    j, e = tl.program_id(1) * KEYS + tl.arange(0, KEYS), tl.arange(0, DP)
    here = (j < T)[:, None] & (e < d)[None, :]
    dk, dv = tl.zeros((KEYS, DP), dkv.dtype.element_ty), tl.zeros((KEYS, DP), dkv.dtype.element_ty)
    for tile in range(0, TILES):
        share = dkv + ((bh * TILES + tile) * T + j)[:, None] * 2 * d + e[None, :]
        dk += tl.load(share, mask=here, other=0.0)
        dv += tl.load(share + d, mask=here, other=0.0)
    at = dqkv + (b * T + j)[:, None] * (3 * H * d) + (H + h) * d + e[None, :]
    tl.store(at, dk.to(dqkv.dtype.element_ty), mask=here)
    tl.store(at + H * d, dv.to(dqkv.dtype.element_ty), mask=here)


def running_attention(
    qkv: Tensor, bias: Tensor, packing: Packing, heads: int, scale: float
) -> Tensor:
    """Attention of token i over keys 0..m-1 for every row (prefix of length m, token i): (N, D).

    qkv: (B longest, 3 D); `bias` is what was added to it: it only gets its gradient.
    """
    return _RunningAttention.apply(qkv, bias, packing, heads, scale)


class _RunningAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, qkv: Tensor, bias: Tensor, packing: Packing, heads: int, scale: float
    ) -> Tensor:
        batch, time, size = packing.batch, packing.longest, qkv.shape[1] // (3 * heads)
        out = qkv.new_empty(packing.rows, heads * size)
        z = torch.empty(batch, heads, time, time, dtype=bias.dtype, device=qkv.device)
        fixed = {
            "SCALE": scale,
            "WIDE": KINDS[bias.dtype],
            "DP": triton.next_power_of_2(size),
            "num_warps": 1,
        }
        grid = (batch * heads, triton.cdiv(time, TOKENS))
        _scan_forward[grid](qkv, packing.row_of, out, z, heads, time, size, TOKENS=TOKENS, **fixed)
        ctx.save_for_backward(qkv, out, z)
        ctx.packing, ctx.heads, ctx.fixed = packing, heads, fixed
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        qkv, out, z = ctx.saved_tensors
        batch, heads, time, _ = z.shape
        size, tiles = out.shape[1] // heads, triton.cdiv(time, TOKENS)
        dqkv, shares = torch.empty_like(qkv), z.new_empty(batch, heads, tiles, time, 2, size)
        sizes = (heads, time, size, tiles)
        tensors = (qkv, ctx.packing.row_of, out, z, grad.contiguous(), dqkv, shares)
        _scan_backward[(batch * heads, tiles)](*tensors, *sizes, TOKENS=TOKENS, **ctx.fixed)
        _add_tiles[(batch * heads, triton.cdiv(time, 16))](
            shares, dqkv, *sizes, KEYS=16, DP=ctx.fixed["DP"]
        )
        return dqkv, column_sums(dqkv, z.dtype), None, None, None
