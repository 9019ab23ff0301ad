"""All prefixes on a GPU: the same savings as packed.py, in kernels that each pass over the rows
once.

What flows between kernels is the residual stream h in fp32 (its gradient in half precision) and,
for the matrix products, normed rows x in half precision. A block reads, from the products y of the
block before it:

    h, x = add_norm(h, y)     attention = prefix_attention(norm_linear(x))      y = linear(attention)
    h, x = add_norm(h, y)                                                       y = activated_linear(norm_linear(x))

Layer 1 takes h from tokens and its attention from a scan, unless each sequence has one prefix only;
the last layer reads h at the end of each prefix only. Rotary positions turn q and k between product
and attention; the last layer then has keys and values of all rows, because a rotation stands
between its matrices.

These kernels read weights: support.py says for which models that is exact.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from entp.engine import packed
from entp.engine.budget import memory_counts
from entp.engine.layout import Layout, Packing, pack, whole_sequences
from entp.engine.triton.attention import prefix_attention
from entp.engine.triton.embed import embed
from entp.engine.triton.last import LastAttention
from entp.engine.triton.linear import bias_of, gain_and_shift, linear, norm_linear
from entp.engine.triton.mlp import GELU, RELU, SILU, activated_linear
from entp.engine.triton.online_softmax import running_attention
from entp.engine.triton.rotary import Rotation, rotate
from entp.engine.triton.rows import (
    LAYER,
    NONE,
    RMS,
    Norm,
    Stream,
    add_norm,
    first_add_norm,
    last_add_norm,
    normed,
    stream_end,
    stream_of,
    stream_start,
)

Block = Any
"""A block whose weights support.py says may be read."""


class Turns(NamedTuple):
    """Rotations of tokens and of rows, the same in every layer; None where nothing turns."""

    tokens: Rotation | None
    rows: Rotation | None


STILL = Turns(None, None)


def prefix_hidden(
    model: Any,
    x: Tensor,
    wanted: Tensor,
    position_ids: Tensor | None = None,
    generous: bool = False,
) -> Tensor:
    """As reference.prefix_hidden: last block's output at the end of each wanted prefix, (M, D),
    sequence by sequence.

    generous: keep activations for the backward pass however many rows there are.
    """
    blocks = model.stack()
    if len(blocks) == 1 or not bool(wanted.any()):
        return packed.prefix_hidden(
            model, x, wanted, position_ids
        )  # no rows of prefixes to compute
    packing = pack(wanted, x.device)
    device = x.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    ids = None if position_ids is None else position_ids[:, : packing.longest]
    h = embed(model, x[:, : packing.longest], ids)
    h = h.to(torch.promote_types(h.dtype, torch.float32))
    with torch.autocast(device, enabled=False):
        keep = generous or not memory_counts(model.width, len(blocks), packing.rows)
        turns = turns_of(model, packing, ids, h.dtype)
        out = upper_layers(
            blocks,
            *first_layer(blocks[0], h, half or h.dtype, packing, keep, turns),
            packing,
            keep,
            turns,
        )
    return out.index_select(0, packing.caller_order)


def causal_hidden(
    model: Any, x: Tensor, free: int | Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """A decoder's last block (B, T, D) by the same kernels: one prefix per sequence, in which key j
    is seen by i if j <= max(i, free - 1). free: a number, or (B,) on the device, one for each
    sequence."""
    blocks, device = model.stack(), x.device.type
    packing = whole_sequences(x.shape[0], x.shape[1], x.device)
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    h = embed(model, x, position_ids)
    rows = h.to(torch.promote_types(h.dtype, torch.float32)).flatten(0, 1)
    with torch.autocast(device, enabled=False):
        keep = not memory_counts(model.width, len(blocks), packing.rows)
        turns = turns_of(model, packing, position_ids, rows.dtype)
        out = causal_layers(blocks, rows, half or rows.dtype, packing, free, keep, turns)
    return out.view(h.shape)


def turns_of(model: Any, packing: Packing, position_ids: Tensor | None, wide: torch.dtype) -> Turns:
    """The rotations of a packing's tokens (B longest) and rows; position_ids: (B, longest), None
    for 0, 1, 2, ..."""
    rotary = model.stack()[0].rotary
    if rotary is None:
        return STILL
    device, size = packing.length.device, model.width // model.stack()[0].heads
    ids = (
        torch.arange(packing.longest, device=device)
        if position_ids is None
        else position_ids.flatten()
    )
    cos, sin = rotary.table(ids, size, wide)
    tokens = torch.arange(packing.batch * packing.longest, device=device)
    if position_ids is None:
        return Turns(
            Rotation(cos, sin, tokens % packing.longest), Rotation(cos, sin, packing.row_token)
        )
    return Turns(Rotation(cos, sin, tokens), Rotation(cos, sin, packing.row_index))


def causal_layers(
    blocks: list[Block],
    rows: Tensor,
    half: torch.dtype,
    packing: Layout,
    free: int | Tensor,
    keep: bool,
    turns: Turns,
) -> Tensor:
    """All blocks of a decoder on the rows (N, D) of whole sequences."""
    h, x = stream_start(rows, half), normed(rows, norm_of(blocks[0].norm_1), half)
    h, y = full_block(blocks[0], h, x, packing, keep, turns, free)
    for before, block in itertools.pairwise(blocks):
        h, x = add_norm(h, y, bias_of(before.out), norm_of(block.norm_1))
        h, y = full_block(block, h, x, packing, keep, turns, free)
    return stream_end(h, y, bias_of(blocks[-1].out))


def projected(block: Block, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """q, k, v of normed rows, (N, 3 D), turned if anything turns; and the bias in them."""
    qkv, bias = norm_linear(x, block.qkv, block.norm_1, add=True)
    return (qkv, bias) if rotation is None else rotate(qkv, bias, rotation)


def full_block(
    block: Block,
    h: Stream,
    x: Tensor,
    packing: Layout,
    keep: bool,
    turns: Turns,
    free: int | Tensor | None = None,
) -> tuple[Stream, Tensor]:
    """A block on every row, from the stream and its normed rows: the stream, and the product that
    has yet to be added to it."""
    qkv, bias = projected(block, x, turns.rows)
    y = linear(
        prefix_attention(qkv, bias, packing, block.heads, block.scale, free), block.proj.weight
    )
    h, x = add_norm(h, y, bias_of(block.proj), norm_of(block.norm_2))
    return h, mlp(block, x, keep)


def first_layer(
    block: Block, h_BTD: Tensor, half: torch.dtype, packing: Packing, keep: bool, turns: Turns
) -> tuple[Stream, Tensor]:
    """Layer 1 from tokens: the stream (N, D), and the product that has yet to be added to it; keep:
    see mlp."""
    if packing.alone:
        rows = h_BTD.flatten(0, 1).index_select(
            0, packing.row_index
        )  # each at most once, so that gradients have an order
        x = normed(rows, norm_of(block.norm_1), half)
        return full_block(block, stream_start(rows, half), x, packing, keep, turns)
    qkv, bias = projected(
        block, normed(h_BTD.flatten(0, 1), norm_of(block.norm_1), half), turns.tokens
    )
    y = linear(running_attention(qkv, bias, packing, block.heads, block.scale), block.proj.weight)
    h, x = first_add_norm(h_BTD, y, bias_of(block.proj), norm_of(block.norm_2), packing)
    return h, mlp(block, x, keep)


def from_first_layer(
    model: Any, h: Tensor, attended: Tensor, packing: Layout, position_ids: Tensor | None = None
) -> Tensor:
    """All that follows layer 1's attention, where each row (N, D) of the stream and of the
    attention is at hand: (M, D).

    position_ids: (N,), of each row; only rotary positions need them.
    """
    blocks, device = model.stack(), h.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
    with torch.autocast(device, enabled=False):
        y = linear(attended.to(half), blocks[0].proj.weight)
        stream, x = add_norm(
            stream_of(h, half), y, bias_of(blocks[0].proj), norm_of(blocks[0].norm_2)
        )
        turns = STILL
        if blocks[0].rotary is not None:
            assert position_ids is not None
            cos, sin = blocks[0].rotary.table(position_ids, model.width // blocks[0].heads, h.dtype)
            turns = Turns(None, Rotation(cos, sin, torch.arange(len(h), device=h.device)))
        return upper_layers(blocks, stream, mlp(blocks[0], x), packing, True, turns)


def mlp(block: Block, x: Tensor, keep: bool = True) -> Tensor:
    """The block's MLP on normed rows, without the bias of its last product; keep its activations
    for the backward pass?"""
    u, bias = norm_linear(x, block.fc, block.norm_2)
    kind = {nn.ReLU: RELU, nn.GELU: GELU, nn.SiLU: SILU}[type(block.activation)]
    return activated_linear(u, bias, block.out.weight, kind, keep=keep)


def upper_layers(
    blocks: list[Block], h: Stream, y: Tensor, packing: Layout, keep: bool, turns: Turns
) -> Tensor:
    """Blocks 2..L, from the stream after block 1 without its last product y: (M, D); keep: see mlp."""
    for before, block in itertools.pairwise(blocks[:-1]):
        h, x = add_norm(h, y, bias_of(before.out), norm_of(block.norm_1))
        h, y = full_block(block, h, x, packing, keep, turns)
    last, before = blocks[-1], blocks[-2]
    return last_layer(
        last,
        *last_add_norm(h, y, bias_of(before.out), norm_of(last.norm_1), packing),
        packing,
        turns,
    )


def last_layer(
    block: Block, h: Stream, x_ND: Tensor, x_MD: Tensor, packing: Layout, turns: Turns
) -> Tensor:
    """The last block at the end of each prefix, from the stream there and the normed rows, all and
    there: (M, D)."""
    if turns.rows is None:
        y = LastAttention.apply(
            x_ND, x_MD, block.qkv.weight, bias_of(block.qkv), *gain_and_shift(block.norm_1), packing, block.heads, block.scale
        )  # fmt: skip
    else:
        attended = prefix_attention(
            *projected(block, x_ND, turns.rows), packing, block.heads, block.scale
        )
        y = attended.index_select(0, packing.ends - 1)
    h, x = add_norm(h, linear(y, block.proj.weight), bias_of(block.proj), norm_of(block.norm_2))
    return stream_end(h, mlp(block, x), bias_of(block.out))


def norm_of(norm: nn.Module) -> Norm:
    """What kernels need to know of a norm."""
    if isinstance(norm, nn.LayerNorm):
        return Norm(LAYER, norm.eps)
    if isinstance(norm, nn.RMSNorm):
        assert norm.eps is not None
        return Norm(RMS, norm.eps)
    return Norm(NONE, 0.0)
