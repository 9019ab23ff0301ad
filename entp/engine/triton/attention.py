"""The middle layers: full attention inside every prefix, in one launch per class of lengths.

With `prefix_length`, a decoder's: key j is seen by query i if j <= max(i, prefix_length - 1). 0 is
causal; more lets the first tokens see each other, as many in every prefix or a number for each.

Defined by `plain_prefix_attention`. Prefixes of up to `whole` rows fit one tile: a program holds
all scores of one head of one prefix, goes from head to head while the next one's rows are on their
way, and its backward pass needs nothing but q, k, v and the gradient. Longer ones stream over tiles
of keys with a running maximum, and their backward pass is two kernels: one owns keys, one owns
queries. No atomics: one program writes each output.

The bias of q, k, v is part of them already; its gradient is added up here, where the gradient's
rows are at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from entp.engine.layout import Layout, Packing
from entp.engine.triton.rows import KINDS, column_sums

SHARED = 136 * 1024
"""Bytes of shared memory for one head's q, k, v and gradient of a tile, and two score matrices."""
ALL, EACH = -1, -2
"""A kernel's PREFIX where every key is seen, and where each prefix has a number of its own."""


def plain_prefix_attention(
    qkv: Tensor,
    packing: Packing,
    heads: int,
    scale: float,
    prefix_length: int | Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v inside each prefix: (N, 3 D) to (N, D).

    prefix_length: causal but for the first so many; a number, or (M,) one for each prefix in packed
        order.
    """
    outputs = []
    counts = [count for _, count in packing.groups]
    lengths = [prefix_length] * len(counts)
    if isinstance(prefix_length, Tensor):
        lengths = list(prefix_length[:, None, None, None].split(counts))
    for (m, count), first, rows in zip(
        packing.groups, lengths, qkv.split(packing.row_counts), strict=True
    ):
        q, k, v = rows.view(count, m, 3, heads, -1).permute(2, 0, 3, 1, 4)
        index = torch.arange(m, device=qkv.device)
        hidden = index[None] > index[:, None].clamp(min=m if first is None else first - 1)
        scores = (scale * q @ k.mT).masked_fill(hidden, float("-inf"))
        outputs.append((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(count * m, -1))
    return torch.cat(outputs)


@dataclass(frozen=True)
class _Class:
    """Consecutive prefixes handled by one launch."""

    first: int
    count: int
    tile: int
    tiles: int
    """Tiles per prefix, 1 if a prefix is one tile."""


def whole(size: int, kind: torch.dtype) -> int:
    """The longest prefix that is one tile: 128 for heads of 64 in half precision."""
    tile = 128
    while tile > 16 and (4 * tile * _padded(size) + 2 * tile * tile) * kind.itemsize > SHARED:
        tile //= 2
    return tile


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _classes(packing: Layout, largest: int) -> list[_Class]:
    """Prefixes by the power of two that holds them, and those longer than the largest tile."""
    counts: dict[tuple[int, int], int] = {}
    for m, count in packing.groups:
        if m <= largest:
            kind = max(16, triton.next_power_of_2(m)), 1
        else:
            kind = min(64, largest), triton.cdiv(packing.longest, min(64, largest))
        counts[kind] = counts.get(kind, 0) + count
    classes, first = [], 0
    for (tile, tiles), count in counts.items():
        classes.append(_Class(first, count, tile, tiles))
        first += count
    return classes


@triton.jit
def _part(qkv, rows, real, part, h, H, d, DP: tl.constexpr):
    """Rows of q (part 0), k (1) or v (2) of head h."""
    e = tl.arange(0, DP)
    at = rows[:, None] * (3 * H * d) + ((part * H + h) * d + e)[None, :]
    return tl.load(qkv + at, mask=real[:, None] & (e < d)[None, :], other=0.0)


@triton.jit
def _rows_of(out, rows, real, h, H, d, DP: tl.constexpr):
    """Rows of head h of a matrix of H d columns."""
    e = tl.arange(0, DP)
    return tl.load(
        out + rows[:, None] * (H * d) + (h * d + e)[None, :],
        mask=real[:, None] & (e < d)[None, :],
        other=0.0,
    )


@triton.jit
def _seen(rows, keys, start, end, prefix_length, p, PREFIX: tl.constexpr):
    """Which keys the queries at `rows` of prefix p see: all, or up to themselves and the first.

    PREFIX: how many those are; -2: prefix_length has it for the prefix; -1: all keys are seen.
    """
    seen = (keys < end)[None, :]
    if PREFIX >= 0:
        seen = seen & (keys[None, :] <= tl.maximum(rows, start + PREFIX - 1)[:, None])
    if PREFIX == -2:
        seen = seen & (
            keys[None, :] <= tl.maximum(rows, start + tl.load(prefix_length + p) - 1)[:, None]
        )
    return seen


@triton.jit
def _softmax(q, k, seen, SCALE: tl.constexpr, WIDE: tl.constexpr):
    """Attention of queries to all keys of a prefix that they see."""
    # exp(x) is 2^(x / log 2)
    s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=WIDE) * (
        SCALE * 1.4426950408889634
    )
    s = tl.where(seen, s, float("-inf"))
    weight = tl.exp2(s - tl.max(s, 1)[:, None])
    return weight * (1.0 / tl.sum(weight, 1))[:, None]


@triton.jit(do_not_specialize=["P0", "H", "GROUP"])
def _attention_forward_whole(
    qkv, starts, ends, prefix_length, out, P0, H, d, GROUP, SCALE: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, DP: tl.constexpr, PREFIX: tl.constexpr, QUERIES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one prefix whose keys are one tile, QUERIES at a time."""
    p = P0 + tl.program_id(0)
    start, end = tl.load(starts + p).to(tl.int64), tl.load(ends + p).to(tl.int64)
    keys, e = start + tl.arange(0, TILE), tl.arange(0, DP)
    real = keys < end
    for h in tl.range(
        tl.program_id(1) * GROUP, tl.minimum(H, tl.program_id(1) * GROUP + GROUP), num_stages=STAGES
    ):
        k, v = _part(qkv, keys, real, 1, h, H, d, DP), _part(qkv, keys, real, 2, h, H, d, DP)
        for first in tl.static_range(0, TILE, QUERIES):
            rows = start + first + tl.arange(0, QUERIES)
            q = _part(qkv, rows, rows < end, 0, h, H, d, DP)
            weight = _softmax(
                q, k, _seen(rows, keys, start, end, prefix_length, p, PREFIX), SCALE, WIDE
            )
            acc = tl.dot(weight.to(v.dtype), v, input_precision="ieee", out_dtype=WIDE)
            at = rows[:, None] * (H * d) + (h * d + e)[None, :]
            tl.store(
                out + at,
                acc.to(out.dtype.element_ty),
                mask=(rows < end)[:, None] & (e < d)[None, :],
            )


@triton.jit(do_not_specialize=["P0", "H"])
def _attention_forward(
    qkv, starts, ends, prefix_length, out, lse, P0, H, d, SCALE: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, DP: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head of a long prefix over all its keys."""
    p, h = P0 + tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + p).to(tl.int64), tl.load(ends + p).to(tl.int64)
    rows = start + tl.program_id(2) * TILE + tl.arange(0, TILE)
    if start + tl.program_id(2) * TILE < end:
        e = tl.arange(0, DP)
        q = _part(qkv, rows, rows < end, 0, h, H, d, DP)
        top = tl.full((TILE,), float("-inf"), WIDE)
        total = tl.zeros((TILE,), WIDE)
        acc = tl.zeros((TILE, DP), WIDE)
        for base in range(start, end, TILE):
            keys = base + tl.arange(0, TILE)
            k, v = (
                _part(qkv, keys, keys < end, 1, h, H, d, DP),
                _part(qkv, keys, keys < end, 2, h, H, d, DP),
            )
            s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=WIDE) * SCALE
            s = tl.where(_seen(rows, keys, start, end, prefix_length, p, PREFIX), s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            weight = tl.exp(s - higher[:, None])
            decay = tl.exp(top - higher)
            total, top = total * decay + tl.sum(weight, 1), higher
            acc = acc * decay[:, None] + tl.dot(
                weight.to(v.dtype), v, input_precision="ieee", out_dtype=WIDE
            )
        at = rows[:, None] * (H * d) + (h * d + e)[None, :]
        tl.store(
            out + at,
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=(rows < end)[:, None] & (e < d)[None, :],
        )
        tl.store(lse + rows * H + h, top + tl.log(total), mask=rows < end)


@triton.jit
def _store_part(dqkv, tile, rows, real, part, h, H, d, DP: tl.constexpr):
    """Gradients of q, k or v."""
    e = tl.arange(0, DP)
    at = rows[:, None] * (3 * H * d) + ((part * H + h) * d + e)[None, :]
    tl.store(dqkv + at, tile.to(dqkv.dtype.element_ty), mask=real[:, None] & (e < d)[None, :])


@triton.jit
def _store_share(share, total, part, slot, h, H, d, DP: tl.constexpr):
    """Their sum over rows, this program's share of the bias's gradient."""
    e = tl.arange(0, DP)
    tl.store(share + slot.to(tl.int64) * (3 * H * d) + (part * H + h) * d + e, total, mask=e < d)


@triton.jit(do_not_specialize=["P0", "H", "GROUP"])
def _attention_backward_whole(
    qkv, starts, ends, prefix_length, grad, dqkv, share, P0, H, d, GROUP, SCALE: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr, DP: tl.constexpr, PREFIX: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one prefix that is one tile."""
    p = P0 + tl.program_id(0)
    start, end = tl.load(starts + p).to(tl.int64), tl.load(ends + p).to(tl.int64)
    keys = start + tl.arange(0, TILE)
    real = keys < end
    for h in tl.range(
        tl.program_id(1) * GROUP, tl.minimum(H, tl.program_id(1) * GROUP + GROUP), num_stages=STAGES
    ):
        k, v = _part(qkv, keys, real, 1, h, H, d, DP), _part(qkv, keys, real, 2, h, H, d, DP)
        q, g = _part(qkv, keys, real, 0, h, H, d, DP), _rows_of(grad, keys, real, h, H, d, DP)
        seen = _seen(keys, keys, start, end, prefix_length, p, PREFIX)
        # Rows past the end have g = 0 and q = 0: they add nothing.
        weight = _softmax(q, k, seen, SCALE, WIDE)
        dv = tl.dot(tl.trans(weight.to(g.dtype)), g, input_precision="ieee", out_dtype=WIDE)
        # Each is stored as soon as it is there: registers are what is short.
        _store_part(dqkv, dv, keys, real, 2, h, H, d, DP)
        _store_share(share, tl.sum(dv, 0), 2, p, h, H, d, DP)
        dp = tl.dot(g, tl.trans(v), input_precision="ieee", out_dtype=WIDE)
        ds = (weight * (dp - tl.sum(weight * dp, 1)[:, None]) * SCALE).to(q.dtype)
        dq = tl.dot(ds, k, input_precision="ieee", out_dtype=WIDE)
        _store_part(dqkv, dq, keys, real, 0, h, H, d, DP)
        _store_share(share, tl.sum(dq, 0), 0, p, h, H, d, DP)
        dk = tl.dot(tl.trans(ds), q, input_precision="ieee", out_dtype=WIDE)
        _store_part(dqkv, dk, keys, real, 1, h, H, d, DP)
        _store_share(share, tl.sum(dk, 0), 1, p, h, H, d, DP)


@triton.jit
def _weights(
    q,
    k,
    rows,
    keys,
    start,
    end,
    prefix_length,
    p,
    lse,
    h,
    H,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    PREFIX: tl.constexpr,
):
    """Attention of the queries at `rows` to the keys at `keys`, from their log-sum-exp."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=WIDE) * SCALE
    z = tl.load(lse + rows * H + h, mask=rows < end, other=0.0)
    return tl.where(
        (rows < end)[:, None] & _seen(rows, keys, start, end, prefix_length, p, PREFIX),
        tl.exp(s - z[:, None]),
        0.0,
    )


@triton.jit(do_not_specialize=["P0", "TILES", "H"])
def _attention_backward_queries(
    qkv, starts, ends, prefix_length, grad, lse, delta, dqkv, share, P0, TILES, H, d,
    SCALE: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, DP: tl.constexpr,
    PREFIX: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head of a long prefix."""
    p, h, tile = P0 + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts + p).to(tl.int64), tl.load(ends + p).to(tl.int64)
    rows = start + tile * TILE + tl.arange(0, TILE)
    if start + tile * TILE < end:
        q, g = (
            _part(qkv, rows, rows < end, 0, h, H, d, DP),
            _rows_of(grad, rows, rows < end, h, H, d, DP),
        )
        inner = tl.load(delta + rows * H + h, mask=rows < end, other=0.0)
        dq = tl.zeros((TILE, DP), WIDE)
        for base in range(start, end, TILE):
            keys = base + tl.arange(0, TILE)
            k, v = (
                _part(qkv, keys, keys < end, 1, h, H, d, DP),
                _part(qkv, keys, keys < end, 2, h, H, d, DP),
            )
            weight = _weights(
                q, k, rows, keys, start, end, prefix_length, p, lse, h, H, SCALE, WIDE, PREFIX
            )
            ds = (
                weight
                * (tl.dot(g, tl.trans(v), input_precision="ieee", out_dtype=WIDE) - inner[:, None])
                * SCALE
            )
            dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee", out_dtype=WIDE)
        _store_part(dqkv, dq, rows, rows < end, 0, h, H, d, DP)
        _store_share(share, tl.sum(dq, 0), 0, P0 + tl.program_id(0) * TILES + tile, h, H, d, DP)


@triton.jit(do_not_specialize=["P0", "TILES", "H"])
def _attention_backward_keys(
    qkv, starts, ends, prefix_length, grad, lse, delta, dqkv, share, P0, TILES, H, d,
    SCALE: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, DP: tl.constexpr,
    PREFIX: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one head of a long prefix."""
    p, h, tile = P0 + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts + p).to(tl.int64), tl.load(ends + p).to(tl.int64)
    keys = start + tile * TILE + tl.arange(0, TILE)
    if start + tile * TILE < end:
        k, v = (
            _part(qkv, keys, keys < end, 1, h, H, d, DP),
            _part(qkv, keys, keys < end, 2, h, H, d, DP),
        )
        dk, dv = tl.zeros((TILE, DP), WIDE), tl.zeros((TILE, DP), WIDE)
        for base in range(start, end, TILE):
            rows = base + tl.arange(0, TILE)
            q, g = (
                _part(qkv, rows, rows < end, 0, h, H, d, DP),
                _rows_of(grad, rows, rows < end, h, H, d, DP),
            )
            inner = tl.load(delta + rows * H + h, mask=rows < end, other=0.0)
            weight = _weights(
                q, k, rows, keys, start, end, prefix_length, p, lse, h, H, SCALE, WIDE, PREFIX
            )
            dv += tl.dot(tl.trans(weight.to(g.dtype)), g, input_precision="ieee", out_dtype=WIDE)
            ds = (
                weight
                * (tl.dot(g, tl.trans(v), input_precision="ieee", out_dtype=WIDE) - inner[:, None])
                * SCALE
            )
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee", out_dtype=WIDE)
        slot = P0 + tl.program_id(0) * TILES + tile
        _store_part(dqkv, dk, keys, keys < end, 1, h, H, d, DP)
        _store_part(dqkv, dv, keys, keys < end, 2, h, H, d, DP)
        _store_share(share, tl.sum(dk, 0), 1, slot, h, H, d, DP)
        _store_share(share, tl.sum(dv, 0), 2, slot, h, H, d, DP)


def prefix_attention(
    qkv: Tensor,
    bias: Tensor,
    packing: Layout,
    heads: int,
    scale: float,
    prefix_length: int | Tensor | None = None,
) -> Tensor:
    """As plain_prefix_attention.

    bias: what was added to qkv, in fp32 or float64; it only gets its gradient.
    """
    return _PrefixAttention.apply(qkv, bias, packing, heads, scale, prefix_length)


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, qkv: Tensor, bias: Tensor, packing: Layout, heads: int, scale: float,
        prefix_length: int | Tensor | None,
    ) -> Tensor:  # fmt: skip
        size = qkv.shape[1] // (3 * heads)
        out = qkv.new_empty(len(qkv), heads * size)
        largest = whole(size, qkv.dtype)
        long = packing.longest > largest
        lse = bias.new_empty(len(qkv) if long else 0, heads)
        each = packing.starts  # a kernel reads it only if PREFIX is EACH
        kind = prefix_length
        if kind is None:
            kind = ALL
        elif isinstance(kind, Tensor):
            each, kind = kind, EACH
        ctx.fixed = {"SCALE": scale, "WIDE": KINDS[bias.dtype], "DP": _padded(size), "PREFIX": kind}
        ctx.classes = _classes(packing, largest)
        for c in ctx.classes:
            where = (packing.starts, packing.ends, each, out)
            if c.tiles == 1:
                group, tiles = _heads_together(c, heads), _whole(c.tile, qkv.dtype)
                _attention_forward_whole[(c.count, triton.cdiv(heads, group))](
                    qkv, *where, c.first, heads, size, group, **ctx.fixed, **tiles
                )
            else:
                _attention_forward[(c.count, heads, c.tiles)](
                    qkv, *where, lse, c.first, heads, size, TILE=c.tile, **ctx.fixed
                )
        kept = [out] if long else []
        ctx.save_for_backward(qkv, lse, each, *kept)
        ctx.packing, ctx.heads = packing, heads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        qkv, lse, each, *out = ctx.saved_tensors
        heads, grad, wide = ctx.heads, grad.contiguous(), lse.dtype
        size = qkv.shape[1] // (3 * heads)
        dqkv = torch.empty_like(qkv)
        # Tiles past the end of a long prefix write nothing.
        make = torch.zeros if out else torch.empty
        slots = sum(c.count * c.tiles for c in ctx.classes)
        share = make(slots, qkv.shape[1], dtype=wide, device=qkv.device)
        for c in ctx.classes:
            where = (qkv, ctx.packing.starts, ctx.packing.ends, each, grad)
            if c.tiles == 1:
                group, tiles = _heads_together(c, heads), _whole(c.tile, qkv.dtype, backward=True)
                _attention_backward_whole[(c.count, triton.cdiv(heads, group))](
                    *where, dqkv, share, c.first, heads, size, group, **ctx.fixed, **tiles
                )
                continue
            delta = (grad.to(wide) * out[0]).view(len(grad), heads, size).sum(-1)
            tables = (lse, delta, dqkv, share, c.first, c.tiles, heads, size)
            for kernel in (_attention_backward_queries, _attention_backward_keys):
                kernel[(c.count, heads, c.tiles)](*where, *tables, TILE=c.tile, **ctx.fixed)
        return dqkv, column_sums(share, wide), None, None, None, None


def _heads_together(c: _Class, heads: int) -> int:
    """Heads of one program: all, unless there are too few prefixes to fill the device."""
    return heads if c.count * heads >= 4096 else 1


def _whole(tile: int, kind: torch.dtype, *, backward: bool = False) -> dict[str, int]:
    """Tile, loads in flight, warps and (forward) queries at a time, as measured on an H200."""
    half = kind.itemsize == 2
    if backward:
        warps = {128: 8, 64: 4}.get(tile, 2)
        return {"TILE": tile, "STAGES": min(3, 256 // tile) if half else 1, "num_warps": warps}
    return {
        "TILE": tile,
        "QUERIES": min(64, tile),
        "STAGES": 2 if half else 1,
        "num_warps": 4 if tile >= 64 else 2,
    }
