"""What stands between the matrix products: residual and norm, folding of the norm, column sums.

A norm's gain and shift are not applied to rows but folded into the matrix that follows: with x of
mean 0 and variance 1,

    W (gain x + shift) + b  =  (W gain) x + (b + W shift)

so x is all that is kept of a norm, and the gradients of gain and shift come from the matrix's own.
Biases are added by the kernel that reads a product, which also adds up their gradient. The plain
functions that define the kernels come first.

The residual stream is fp32 on its way up; its gradient comes down in half precision, to which the
matrix products would round it anyway (docs/engine.md, precision).

Each is one pass over the rows.

Names: N rows, D width, K any width; `wide` is fp32 or float64, `half` what matrix products take:
bf16, or the same as wide.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from entp.engine.layout import Layout, Packing

PROGRAMS = 528
"""Programs where columns are added up: four for each of an H200's multiprocessors."""


NONE, LAYER, RMS = 0, 1, 2
"""Kinds of norms."""


class Norm(NamedTuple):
    """Which norm follows, and its epsilon."""

    kind: int
    eps: float


class Stream(NamedTuple):
    """The residual stream.

    Autograd gives a tensor's gradient the tensor's own type, so another tensor carries it.
    """

    rows: Tensor
    """(N, D), wide. No gradient passes through it."""
    carrier: Tensor
    """(N, D) in half, without memory of its own: its gradient is that of the rows."""


def plain_add_norm(h_ND: Tensor, y_ND: Tensor, bias_D: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The residual stream after adding y + bias, and its normed rows (without gain and shift)."""
    h_ND = h_ND + y_ND + bias_D
    return h_ND, plain_norm(h_ND, norm)


def plain_norm(h_ND: Tensor, norm: Norm) -> Tensor:
    """Rows normed, without gain and shift."""
    if norm.kind == NONE:
        return h_ND
    return (F.layer_norm if norm.kind == LAYER else F.rms_norm)(h_ND, h_ND.shape[-1:], eps=norm.eps)


def plain_fold(
    w_KD: Tensor, bias_K: Tensor, gain_D: Tensor, shift_D: Tensor
) -> tuple[Tensor, Tensor]:
    """A matrix and bias that do to normed rows what w and bias do after gain and shift."""
    return w_KD * gain_D, bias_K + w_KD @ shift_D


@triton.jit
def _normed(value, inside, D, eps, NORM: tl.constexpr):
    """Rows of mean square 1, for layer norm (NORM 1) also of mean 0, and their factors."""
    if NORM == 1:
        value = tl.where(inside, value - (tl.sum(value, 1) / D)[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)
    return value * r[:, None], r


@triton.jit
def _norm_gradient(g, x, r, D, NORM: tl.constexpr):
    """The gradient of what was normed to x, from the gradient g of x."""
    back = g - x * (tl.sum(g * x, 1) / D)[:, None]
    if NORM == 1:
        back = back - (tl.sum(g, 1) / D)[:, None]
    return r[:, None] * back


@triton.jit(do_not_specialize=["N"])
def _add_norm(
    h, y, bias, index, h_out, x_out, last_out, r_out, N, D, EPS: tl.constexpr, KIND: tl.constexpr,
    NORM: tl.constexpr, R: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """R rows of h + y + bias, and the same normed.

    KIND 0: rows of h as they stand; 1: row n is h[index[n]]; 2: h_out and last_out take rows with
    index[n] >= 0.
    """
    rows, cols = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, DP)
    inside = (rows < N)[:, None] & (cols < D)[None, :]
    at = rows[:, None] * D + cols[None, :]
    source = rows
    if KIND == 1:
        source = tl.load(index + rows, mask=rows < N, other=0).to(tl.int64)
    wide = h.dtype.element_ty
    value = tl.load(h + source[:, None] * D + cols[None, :], mask=inside, other=0.0)
    value += (
        tl.load(y + at, mask=inside, other=0.0).to(wide)
        + tl.load(bias + cols, mask=cols < D, other=0.0).to(wide)[None, :]
    )
    if KIND == 2:
        slot = tl.load(index + rows, mask=rows < N, other=-1).to(tl.int64)
        tl.store(
            h_out + slot[:, None] * D + cols[None, :], value, mask=inside & (slot >= 0)[:, None]
        )
    else:
        tl.store(h_out + at, value, mask=inside)
    if NORM:
        value, r = _normed(value, inside, D, EPS, NORM)
        tl.store(r_out + rows, r, mask=rows < N)
    value = value.to(x_out.dtype.element_ty)
    tl.store(x_out + at, value, mask=inside)
    if KIND == 2:
        tl.store(
            last_out + slot[:, None] * D + cols[None, :], value, mask=inside & (slot >= 0)[:, None]
        )


@triton.jit(do_not_specialize=["N", "PER"])
def _add_norm_backward(
    dh, dx, dlast, x, r_in, index, dh_out, db_out, N, D, PER, KIND: tl.constexpr,
    NORM: tl.constexpr, STAGES: tl.constexpr, R: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """PER tiles of R rows: the gradient of h and y, and this program's share of the bias's."""
    cols = tl.arange(0, DP)
    wide = db_out.dtype.element_ty
    total = tl.zeros((DP,), wide)
    for tile in tl.range(0, PER, num_stages=STAGES):
        rows = (tile * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * R + tl.arange(0, R)
        inside = (rows < N)[:, None] & (cols < D)[None, :]
        at = rows[:, None] * D + cols[None, :]
        g = tl.load(dx + at, mask=inside, other=0.0).to(wide)
        if KIND == 2:
            slot = tl.load(index + rows, mask=rows < N, other=-1).to(tl.int64)
            there, real = slot[:, None] * D + cols[None, :], inside & (slot >= 0)[:, None]
            g += tl.load(dlast + there, mask=real, other=0.0).to(wide)
        if NORM:
            r = tl.load(r_in + rows, mask=rows < N, other=0.0)
            g = tl.where(
                inside,
                _norm_gradient(g, tl.load(x + at, mask=inside, other=0.0).to(wide), r, D, NORM),
                0.0,
            )
        if KIND == 2:
            g += tl.load(dh + there, mask=real, other=0.0).to(wide)
        else:
            g += tl.load(dh + at, mask=inside, other=0.0).to(wide)
        tl.store(dh_out + at, g.to(dh_out.dtype.element_ty), mask=inside)
        total += tl.sum(g, 0)
    tl.store(db_out + tl.program_id(0) * D + cols, total, mask=cols < D)


@triton.jit(do_not_specialize=["T"])
def _first_add_norm_backward(
    dh,
    dx,
    x,
    r_in,
    row_of,
    dh_out,
    dy_out,
    T,
    D,
    NORM: tl.constexpr,
    R: tl.constexpr,
    DP: tl.constexpr,
):
    """One token of one sequence: its gradient is the sum over the prefixes it stands in."""
    token, cols = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    i = token % T
    wide = dh_out.dtype.element_ty
    total = tl.zeros((R, DP), wide)
    for start in range(i, T, R):
        end = start + tl.arange(0, R)
        first = tl.load(row_of + token - i + end, mask=end < T, other=-1)
        rows = first.to(tl.int64) + i
        inside = (first >= 0)[:, None] & (cols < D)[None, :]
        at = rows[:, None] * D + cols[None, :]
        g = tl.load(dx + at, mask=inside, other=0.0).to(wide)
        if NORM:
            r = tl.load(r_in + rows, mask=first >= 0, other=0.0)
            g = tl.where(
                inside,
                _norm_gradient(g, tl.load(x + at, mask=inside, other=0.0).to(wide), r, D, NORM),
                0.0,
            )
        g += tl.load(dh + at, mask=inside, other=0.0).to(wide)
        tl.store(dy_out + at, g.to(dy_out.dtype.element_ty), mask=inside)
        total += g
    tl.store(dh_out + token * D + cols, tl.sum(total, 0), mask=cols < D)


@triton.jit(do_not_specialize=["K"])
def _fold(w, bias, gain, shift, w_out, b_out, K, D, R: tl.constexpr, DP: tl.constexpr):
    rows, cols = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, DP)
    inside = (rows < K)[:, None] & (cols < D)[None, :]
    at = rows[:, None] * D + cols[None, :]
    value = tl.load(w + at, mask=inside, other=0.0)
    gains, shifts = (
        tl.load(gain + cols, mask=cols < D, other=0.0),
        tl.load(shift + cols, mask=cols < D, other=0.0),
    )
    tl.store(w_out + at, (value * gains[None, :]).to(w_out.dtype.element_ty), mask=inside)
    tl.store(
        b_out + rows,
        tl.load(bias + rows, mask=rows < K, other=0.0) + tl.sum(value * shifts[None, :], 1),
        mask=rows < K,
    )


@triton.jit(do_not_specialize=["K"])
def _fold_backward(dw, db, w, gain, shift, dw_out, sums, K, D, R: tl.constexpr, DP: tl.constexpr):
    """R rows of the matrix's gradient, and their shares of the gradients of gain and shift."""
    rows, cols = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, DP)
    inside = (rows < K)[:, None] & (cols < D)[None, :]
    at = rows[:, None] * D + cols[None, :]
    g, weight = tl.load(dw + at, mask=inside, other=0.0), tl.load(w + at, mask=inside, other=0.0)
    gains, shifts = (
        tl.load(gain + cols, mask=cols < D, other=0.0),
        tl.load(shift + cols, mask=cols < D, other=0.0),
    )
    d_bias = tl.load(db + rows, mask=rows < K, other=0.0)[:, None]
    tl.store(dw_out + at, g * gains[None, :] + d_bias * shifts[None, :], mask=inside)
    share = tl.program_id(0) * 2 * D + cols
    tl.store(sums + share, tl.sum(g * weight, 0), mask=cols < D)
    tl.store(sums + share + D, tl.sum(weight * d_bias, 0), mask=cols < D)


def add_norm(h: Stream, y: Tensor, bias: Tensor, norm: Norm) -> tuple[Stream, Tensor]:
    """As plain_add_norm; the normed rows have y's type."""
    rows, carrier, x = _AddNorm.apply(*h, y, bias, norm)
    return Stream(rows, carrier), x


def first_add_norm(
    h_BTD: Tensor, y: Tensor, bias: Tensor, norm: Norm, packing: Packing
) -> tuple[Stream, Tensor]:
    """The same where h is still that of tokens: row n has token packing.row_index[n] of all B T."""
    rows, carrier, x = _FirstAddNorm.apply(h_BTD, y, bias, norm, packing)
    return Stream(rows, carrier), x


def last_add_norm(
    h: Stream, y: Tensor, bias: Tensor, norm: Norm, packing: Layout
) -> tuple[Stream, Tensor, Tensor]:
    """The same where the stream is read only at the end of each prefix: (M, D).

    Also the normed rows, all (N, D) and those at the ends (M, D).
    """
    rows, carrier, x, last = _LastAddNorm.apply(*h, y, bias, norm, packing)
    return Stream(rows, carrier), x, last


def stream_of(rows: Tensor, half: torch.dtype) -> Stream:
    """A stream that begins with these rows; gradients do not pass."""
    return Stream(rows.detach(), _carrier(rows, half))


def stream_start(rows: Tensor, half: torch.dtype) -> Stream:
    """A stream that begins with these rows, which get its gradient."""
    return Stream(*_StreamStart.apply(rows, half))


def stream_end(h: Stream, y: Tensor, bias: Tensor) -> Tensor:
    """The rows after adding y + bias, as a tensor like any other."""
    return _StreamEnd.apply(*h, y) + bias


def _carrier(rows: Tensor, half: torch.dtype) -> Tensor:
    return torch.empty(1, dtype=half, device=rows.device).expand(rows.shape)


class _StreamStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, half: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.kind = rows.dtype
        same = rows.view_as(rows)
        ctx.mark_non_differentiable(same)
        ctx.set_materialize_grads(False)
        return same, _carrier(rows, half)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.kind), None


class _StreamEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, carrier: Tensor, y: Tensor) -> Tensor:
        ctx.half = y.dtype
        return rows + y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        grad = grad.to(ctx.half)
        return None, grad, grad


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, rows: Tensor, carrier: Tensor, y: Tensor, bias: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.empty_like(rows)
        x, r = _launch_add_norm(rows, y, bias, None, out, None, 0, norm)
        ctx.save_for_backward(x, r)
        ctx.norm = norm
        ctx.mark_non_differentiable(out)
        ctx.set_materialize_grads(False)  # zeros for the rows would be a pass of their own
        return out, _carrier(out, y.dtype), x

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor, dh: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:
        x, r = ctx.saved_tensors
        dh, db = _launch_add_norm_backward(dh.contiguous(), dx, None, x, r, None, 0, ctx.norm)
        return None, dh, dh, db, None


class _FirstAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, h: Tensor, y: Tensor, bias: Tensor, norm: Norm, packing: Packing
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = h.new_empty(y.shape)
        x, r = _launch_add_norm(h.contiguous(), y, bias, packing.row_index, out, None, 1, norm)
        ctx.save_for_backward(x, r)
        ctx.norm, ctx.packing, ctx.shape = norm, packing, h.shape
        ctx.mark_non_differentiable(out)
        ctx.set_materialize_grads(False)  # zeros for the rows would be a pass of their own
        return out, _carrier(out, y.dtype), x

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor, dh: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:
        x, r = ctx.saved_tensors
        batch, time, width = ctx.shape
        d_tokens, dy = r.new_empty(ctx.shape), torch.empty_like(x)
        dh, dx, first = dh.contiguous(), dx.contiguous(), ctx.packing.row_of
        _first_add_norm_backward[(batch * time,)](
            dh, dx, x, r, first, d_tokens, dy, time, width, ctx.norm.kind, **_tile(width)
        )
        return d_tokens, dy, column_sums(d_tokens.flatten(0, 1), r.dtype), None, None


class _LastAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, rows: Tensor, carrier: Tensor, y: Tensor, bias: Tensor, norm: Norm, packing: Layout
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, last = (t.new_empty(len(packing.length), rows.shape[1]) for t in (rows, y))
        x, r = _launch_add_norm(rows, y, bias, packing.last_slot, out, last, 2, norm)
        ctx.save_for_backward(x, r)
        ctx.norm, ctx.packing = norm, packing
        ctx.mark_non_differentiable(out)
        ctx.set_materialize_grads(False)  # zeros for the rows would be a pass of their own
        return out, _carrier(out, y.dtype), x, last

    @staticmethod
    @once_differentiable
    def backward(
        ctx, _: Tensor, dh: Tensor, dx: Tensor, dlast: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, r = ctx.saved_tensors
        slots = ctx.packing.last_slot
        dlast = torch.zeros_like(dh) if dlast is None else dlast.contiguous()
        dh, db = _launch_add_norm_backward(dh.contiguous(), dx, dlast, x, r, slots, 2, ctx.norm)
        return None, dh, dh, db, None, None


def _launch_add_norm(
    h: Tensor,
    y: Tensor,
    bias: Tensor,
    index: Tensor | None,
    out: Tensor,
    last: Tensor | None,
    kind: int,
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """Fills out and last; returns the normed rows and 1 over their standard deviations."""
    count, width = y.shape
    x, r = torch.empty_like(y), h.new_empty(count if norm.kind else 0)
    tile = _tile(width)
    _add_norm[(triton.cdiv(count, tile["R"]),)](
        h, y, bias, index, out, x, last, r, count, width, norm.eps, kind, norm.kind, **tile
    )
    return x, r


def _launch_add_norm_backward(
    dh: Tensor,
    dx: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    r: Tensor,
    index: Tensor | None,
    kind: int,
    norm: Norm,
) -> tuple[Tensor, Tensor]:
    """The gradient of h and y, and that of the bias."""
    count, width = x.shape
    tile = _backward_tile(width, x.dtype)
    per, programs = shares(triton.cdiv(count, tile["R"]), PROGRAMS)
    dh_out, db = torch.empty_like(x), r.new_empty(programs, width)
    tensors = (dh, dx.contiguous(), dlast, x, r, index, dh_out, db)
    _add_norm_backward[(programs,)](*tensors, count, width, per, kind, norm.kind, **tile)
    return dh_out, column_sums(db, db.dtype)


@triton.jit(do_not_specialize=["N"])
def _norm_rows(
    h, x_out, r_out, N, D, EPS: tl.constexpr, NORM: tl.constexpr, R: tl.constexpr, DP: tl.constexpr
):
    rows, cols = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, DP)
    inside = (rows < N)[:, None] & (cols < D)[None, :]
    at = rows[:, None] * D + cols[None, :]
    x, r = _normed(tl.load(h + at, mask=inside, other=0.0), inside, D, EPS, NORM)
    tl.store(x_out + at, x.to(x_out.dtype.element_ty), mask=inside)
    tl.store(r_out + rows, r, mask=rows < N)


@triton.jit(do_not_specialize=["N"])
def _norm_rows_backward(
    dx, x, r_in, dh_out, N, D, NORM: tl.constexpr, R: tl.constexpr, DP: tl.constexpr
):
    rows, cols = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, DP)
    inside = (rows < N)[:, None] & (cols < D)[None, :]
    at = rows[:, None] * D + cols[None, :]
    g = tl.load(dx + at, mask=inside, other=0.0).to(dh_out.dtype.element_ty)
    value = tl.load(x + at, mask=inside, other=0.0).to(dh_out.dtype.element_ty)
    g = _norm_gradient(g, value, tl.load(r_in + rows, mask=rows < N, other=0.0), D, NORM)
    tl.store(dh_out + at, g, mask=inside)


def normed(h: Tensor, norm: Norm, half: torch.dtype) -> Tensor:
    """Rows h (N, D) normed, without gain and shift, in `half`; as they are without a norm."""
    return _Normed.apply(h, norm, half) if norm.kind else h.to(half)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor, norm: Norm, half: torch.dtype) -> Tensor:
        h = h.contiguous()
        x, r = torch.empty_like(h, dtype=half), h.new_empty(len(h))
        tile = _tile(h.shape[1])
        _norm_rows[(triton.cdiv(len(h), tile["R"]),)](
            h, x, r, *h.shape, norm.eps, norm.kind, **tile
        )
        ctx.save_for_backward(x, r)
        ctx.norm = norm
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None, None]:
        x, r = ctx.saved_tensors
        dh, tile = torch.empty_like(x, dtype=r.dtype), _tile(x.shape[1])
        _norm_rows_backward[(triton.cdiv(len(x), tile["R"]),)](
            dx.contiguous(), x, r, dh, *x.shape, ctx.norm.kind, **tile
        )
        return dh, None, None


@triton.jit(do_not_specialize=["P"])
def _column_sums(part, out, P, K, R: tl.constexpr, C: tl.constexpr):
    cols = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((C,), out.dtype.element_ty)
    for start in range(0, P, R):
        rows = (start + tl.arange(0, R)).to(tl.int64)
        at = rows[:, None] * K + cols[None, :]
        value = tl.load(part + at, mask=(rows < P)[:, None] & (cols < K)[None, :], other=0.0)
        total += tl.sum(value.to(out.dtype.element_ty), 0)
    tl.store(out + cols, total, mask=cols < K)


def column_sums(part: Tensor, kind: torch.dtype) -> Tensor:
    """part.sum(0) in `kind`, in a fixed order, fast for far more rows than columns."""
    part, out = part.contiguous(), torch.empty(part.shape[1], dtype=kind, device=part.device)
    _column_sums[(triton.cdiv(part.shape[1], 8),)](part, out, *part.shape, 1024, 8, num_warps=8)
    return out


def fold(
    w: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, half: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As plain_fold, the matrix in `half`. Not differentiable by itself: see fold_backward."""
    w_out, b_out = torch.empty_like(w, dtype=half), torch.empty_like(bias)
    tile = _tile(w.shape[1])
    _fold[(triton.cdiv(w.shape[0], tile["R"]),)](
        w, bias, gain, shift, w_out, b_out, *w.shape, **tile
    )
    return w_out, b_out


def fold_backward(
    dw: Tensor, db: Tensor, w: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of w, gain and shift from those of the folded matrix and bias."""
    tile = _tile(w.shape[1])
    programs = triton.cdiv(w.shape[0], tile["R"])
    dw_out, sums = torch.empty_like(w), w.new_empty(programs, 2, w.shape[1])
    _fold_backward[(programs,)](dw, db, w, gain, shift, dw_out, sums, *w.shape, **tile)
    d_gain, d_shift = column_sums(sums.flatten(1), sums.dtype).view(2, -1)
    return dw_out, d_gain, d_shift


KINDS = {torch.float32: tl.float32, torch.float64: tl.float64}


def _tile(width: int) -> dict[str, int]:
    """Rows of a tile, its columns padded to a power of two, and warps."""
    padded = triton.next_power_of_2(width)
    return {
        "R": max(1, min(16, 2048 // padded)),
        "DP": padded,
        "num_warps": 2 if padded <= 512 else 4,
    }


def _backward_tile(width: int, kind: torch.dtype) -> dict[str, int]:
    """The same for the backward pass, with loads in flight, as measured on an H200."""
    tile = _tile(width)
    if kind.itemsize != 2:
        return {"STAGES": 1, **tile}
    return {"STAGES": 3, **tile, "R": max(1, min(16, 4096 // tile["DP"]))}


def shares(tiles: int, programs: int) -> tuple[int, int]:
    """Tiles for each program, and how many programs that takes."""
    per = triton.cdiv(tiles, programs)
    return per, triton.cdiv(tiles, per)
