"""Rotary positions: queries and keys turned in place, between their product and attention.

Defined by `plain_rotate`. Feature e of a head turns together with feature e + d / 2. The angles
come as a table of cosines and sines, made by the model's own rotary module, and an index that says
which row of it each row of q, k, v takes.

The gradient of the bias of q, k, v is added up where their gradient stands before it is turned
back; so the kernel that turns it back adds up the shares of q and k anew. Those of v are right as
they come.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from entp.engine.triton.rows import PROGRAMS, _tile, column_sums, shares


class Rotation(NamedTuple):
    """Which way each row turns."""

    cos: Tensor
    """(P, d / 2) in fp32 or float64."""
    sin: Tensor
    which: Tensor
    """(N,) the row of the table for each row of q, k, v."""


def plain_rotate(qkv_NK: Tensor, rotation: Rotation, heads: int) -> Tensor:
    """Rows of q, k, v (N, 3 D) with q and k turned."""
    q, k, v = qkv_NK.unflatten(1, (3, heads, -1)).unbind(1)
    cos, sin = (table[rotation.which][:, None] for table in rotation[:2])
    turned = []
    for part in (q, k):
        one, two = part.chunk(2, -1)
        turned.append(torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(v.dtype))
    return torch.stack([*turned, v], 1).flatten(1)


@triton.jit(do_not_specialize=["N", "PER"])
def _rotate(
    x, cos, sin, index, sums, N, D, HALF, PER, BACK: tl.constexpr, R: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """PER tiles of R rows, D pairs of features of q and k each. BACK: turn back, sum columns."""
    pairs = tl.arange(0, DP)
    e = pairs % HALF
    first = (pairs // HALF) * (2 * HALF) + e
    wide = cos.dtype.element_ty
    total_1, total_2 = tl.zeros((DP,), wide), tl.zeros((DP,), wide)
    for tile in range(0, PER):
        rows = (tile * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * R + tl.arange(0, R)
        inside = (rows < N)[:, None] & (pairs < D)[None, :]
        at = rows[:, None] * (3 * D) + first[None, :]
        angle = (
            tl.load(index + rows, mask=rows < N, other=0).to(tl.int64)[:, None] * HALF + e[None, :]
        )
        c, s = (
            tl.load(cos + angle, mask=inside, other=0.0),
            tl.load(sin + angle, mask=inside, other=0.0),
        )
        if BACK:
            s = -s
        one = tl.load(x + at, mask=inside, other=0.0).to(wide)
        two = tl.load(x + at + HALF, mask=inside, other=0.0).to(wide)
        new_1, new_2 = one * c - two * s, two * c + one * s
        tl.store(x + at, new_1.to(x.dtype.element_ty), mask=inside)
        tl.store(x + at + HALF, new_2.to(x.dtype.element_ty), mask=inside)
        if BACK:
            total_1 += tl.sum(new_1, 0)
            total_2 += tl.sum(new_2, 0)
    if BACK:
        own = sums + tl.program_id(0) * (2 * D) + first
        tl.store(own, total_1, mask=pairs < D)
        tl.store(own + HALF, total_2, mask=pairs < D)


def rotate(qkv: Tensor, bias: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """As plain_rotate, in place; and the bias that was added to qkv: its gradient is made here."""
    return _Rotate.apply(qkv, bias, *rotation)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, qkv: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        _launch(qkv, cos, sin, index, back=False)
        ctx.mark_dirty(qkv)
        ctx.save_for_backward(cos, sin, index)
        return qkv, bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, d_bias: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad = grad.contiguous()  # attention's own, which nothing else reads: turned back in place
        sums = _launch(grad, *ctx.saved_tensors, back=True)
        turned = column_sums(sums, sums.dtype)
        return grad, torch.cat([turned, d_bias[len(turned) :]]), None, None, None


def _launch(qkv: Tensor, cos: Tensor, sin: Tensor, index: Tensor, *, back: bool) -> Tensor:
    """Turns q and k of the rows in place; back: returns their columns' sums, one per program."""
    count, width = len(qkv), qkv.shape[1] // 3
    tile = _tile(width)
    per, programs = 1, triton.cdiv(count, tile["R"])
    if back:
        per, programs = shares(programs, PROGRAMS)
    sums = cos.new_empty(programs if back else 0, 2 * width)
    _rotate[(programs,)](
        qkv, cos, sin, index, sums, count, width, cos.shape[1], per, BACK=back, **tile
    )
    return sums
