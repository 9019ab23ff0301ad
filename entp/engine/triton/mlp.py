"""The second half of an MLP: bias and activation in one pass over the rows, then the product.

Defined by `plain_activated_linear`. The kernel that passes back through the activation also adds up
the bias's gradient, and on request recomputes the activations, which the product's gradient needs:
a quarter more bytes in that pass, and of what a layer keeps for its backward pass two sevenths
less.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from entp.engine.triton.cublaslt import product
from entp.engine.triton.linear import weight_gradient
from entp.engine.triton.rows import KINDS, column_sums, shares

RELU, GELU, SILU = 0, 1, 2
"""Kinds of activations; GELU is the tanh form."""


def plain_activated_linear(u_NK: Tensor, bias_K: Tensor, w_DK: Tensor, kind: int) -> Tensor:
    """The activation of u + bias, times w transposed: (N, D)."""
    u_NK = u_NK + bias_K
    if kind == GELU:
        return F.gelu(u_NK, approximate="tanh") @ w_DK.T
    return (F.silu(u_NK) if kind == SILU else F.relu(u_NK)) @ w_DK.T


@triton.jit
def _gate(u, KIND: tl.constexpr):
    """The sigmoid in u gate(u): of u (SiLU), of 1.5957691216057308 (u + 0.044715 u^3) (GELU)."""
    if KIND == 1:
        return 1.0 / (1.0 + tl.exp2(u * (-2.302208198144325 - 0.10294323958002349 * u * u)))
    return 1.0 / (1.0 + tl.exp2(u * -1.4426950408889634))


@triton.jit(do_not_specialize=["N"])
def _activate(
    u, bias, out, N, K, WIDE: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    rows, cols = (
        tl.program_id(0).to(tl.int64) * R + tl.arange(0, R),
        tl.program_id(1) * C + tl.arange(0, C),
    )
    inside = (rows < N)[:, None] & (cols < K)[None, :]
    at = rows[:, None] * K + cols[None, :]
    value = (
        tl.load(u + at, mask=inside, other=0.0).to(WIDE)
        + tl.load(bias + cols, mask=cols < K, other=0.0).to(WIDE)[None, :]
    )
    value = value * _gate(value, KIND) if KIND else tl.maximum(value, 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "PER"])
def _activate_backward(
    u, bias, grad, du, db_out, N, K, PER, WIDE: tl.constexpr, KIND: tl.constexpr,
    RECOMPUTE: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """PER tiles of R rows, C columns: the gradient of u, and this program's share of the bias's.

    RECOMPUTE: the activations take the place of their gradient.
    """
    cols = tl.program_id(1) * C + tl.arange(0, C)
    shift = tl.load(bias + cols, mask=cols < K, other=0.0).to(WIDE)[None, :]
    total = tl.zeros((C,), WIDE)
    for tile in tl.range(0, PER, num_stages=STAGES):
        rows = (tile * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * R + tl.arange(0, R)
        inside = (rows < N)[:, None] & (cols < K)[None, :]
        at = rows[:, None] * K + cols[None, :]
        value = tl.load(u + at, mask=inside, other=0.0).to(WIDE) + shift
        g = tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
        if KIND:
            gate = _gate(value, KIND)
            slope = 1.5957691216057308 + 0.21406444881780074 * value * value if KIND == 1 else 1.0
            g *= gate + gate * value * (slope - gate * slope)
            value *= gate
        else:
            g = tl.where(value > 0, g, 0.0)
            value = tl.maximum(value, 0.0)
        tl.store(du + at, g.to(du.dtype.element_ty), mask=inside)
        if RECOMPUTE:
            tl.store(grad + at, value.to(grad.dtype.element_ty), mask=inside)
        total += tl.sum(g, 0)
    tl.store(db_out + tl.program_id(0) * K + cols, total, mask=cols < K)


def activated_linear(u: Tensor, bias: Tensor, w: Tensor, kind: int, *, recompute: bool) -> Tensor:
    """As plain_activated_linear, in u's type.

    recompute: the backward pass computes the activations once more; without, they are kept for it.
    """
    return _ActivatedLinear.apply(u, bias, w, int(kind), recompute)


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u: Tensor, bias: Tensor, w: Tensor, kind: int, recompute: bool) -> Tensor:
        half, a = w.to(u.dtype), torch.empty_like(u)
        cols = _columns(u.shape[1])
        rows = 4096 // cols
        grid = (triton.cdiv(u.shape[0], rows), triton.cdiv(u.shape[1], cols))
        _activate[grid](u, bias, a, *u.shape, KINDS[bias.dtype], kind, rows, cols, num_warps=8)
        kept = [] if recompute else [a]
        ctx.save_for_backward(u, bias, half, *kept)
        ctx.activation, ctx.kind = kind, w.dtype
        return product(a, half)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        u, bias, half, *kept = ctx.saved_tensors
        grad = grad.contiguous()
        du, g = torch.empty_like(u), product(grad, half, plain=True)
        tile = _backward_tile(u.shape[1], u.dtype)
        across = triton.cdiv(u.shape[1], tile["C"])
        per, programs = shares(
            triton.cdiv(u.shape[0], tile["R"]), triton.cdiv(_programs(u.shape[1]), across)
        )
        db = bias.new_empty(programs, u.shape[1])
        _activate_backward[(programs, across)](
            u, bias, g, du, db, *u.shape, per, KINDS[bias.dtype], ctx.activation, not kept, **tile
        )
        a = kept[0] if kept else g
        dw = weight_gradient(grad, a, ctx.kind)
        return du, column_sums(db, db.dtype), dw, None, None


def _columns(width: int) -> int:
    """Columns of a tile."""
    return 512 if width % 512 == 0 else 128


def _programs(width: int) -> int:
    """Programs of the backward pass: as many as an H200 runs at once, or twice that."""
    return 528 if _columns(width) == 512 else 1056


def _backward_tile(width: int, kind: torch.dtype) -> dict[str, int]:
    """Tile, loads in flight and warps of the backward pass, as measured on an H200."""
    cols = _columns(width)
    rows, stages = (16, 2) if cols == 512 else (32, 3)
    return {"STAGES": stages if kind.itemsize == 2 else 1, "R": rows, "C": cols, "num_warps": 4}
