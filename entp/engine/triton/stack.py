"""All prefixes on a GPU: the same savings as packed.py, in kernels that pass over the rows once.

What flows between kernels is the residual stream h in fp32 (its gradient in half precision) and,
for the matrix products, normed rows x in half precision. A block is, from the product y of the
block before it:

    h, x = add_norm(h, y)
    y = linear(prefix_attention(norm_linear(x)))
    h, x = add_norm(h, y)
    y = activated_linear(norm_linear(x))

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
    target_mask: Tensor,
    position_ids: Tensor | None = None,
    recompute: bool = True,
) -> Tensor:
    """As reference.prefix_hidden: the last block's output at the end of each prefix, (M, D).

    recompute: if there are many rows, compute activations once more in the backward pass instead of
        keeping them.
    """
    blocks = model.stack()
    if len(blocks) == 1 or not bool(target_mask.any()):  # no rows of prefixes to compute
        return packed.prefix_hidden(model, x, target_mask, position_ids)
    packing = pack(target_mask, x.device)
    device = x.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    ids = None if position_ids is None else position_ids[:, : packing.longest]
    h = embed(model, x[:, : packing.longest], ids)
    h = h.to(torch.promote_types(h.dtype, torch.float32))
    with torch.autocast(device, enabled=False):
        recompute = recompute and memory_counts(model.width, len(blocks), packing.rows)
        turns = turns_of(model, packing, ids, h.dtype)
        if first := model.causal_stack():
            whole = whole_sequences(h.shape[0], h.shape[1], x.device)
            own = turns_of(model, whole, ids, h.dtype)
            rows = h.flatten(0, 1)
            h = causal_layers(first, rows, half or h.dtype, whole, 0, recompute, own).view(h.shape)
        stream, y = first_layer(blocks[0], h, half or h.dtype, packing, recompute, turns)
        out = upper_layers(blocks, stream, y, packing, recompute, turns)
    return out.index_select(0, packing.caller_order)


def causal_hidden(
    model: Any, x: Tensor, prefix_length: int | Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """A decoder's last block (B, T, D) by the same kernels, with one prefix per sequence.

    Key j is seen by query i if j <= max(i, prefix_length - 1).
    prefix_length: a number, or (B,) on the device, one for each sequence.
    """
    blocks, device = model.stack(), x.device.type
    packing = whole_sequences(x.shape[0], x.shape[1], x.device)
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    h = embed(model, x, position_ids)
    rows = h.to(torch.promote_types(h.dtype, torch.float32)).flatten(0, 1)
    with torch.autocast(device, enabled=False):
        recompute = memory_counts(model.width, len(blocks), packing.rows)
        turns = turns_of(model, packing, position_ids, rows.dtype)
        wide = half or rows.dtype
        if first := model.causal_stack():
            rows = causal_layers(first, rows, wide, packing, 0, recompute, turns)
        rows = causal_layers(blocks, rows, wide, packing, prefix_length, recompute, turns)
    return rows.view(h.shape)


def turns_of(model: Any, packing: Packing, position_ids: Tensor | None, wide: torch.dtype) -> Turns:
    """The rotations of a packing's tokens (B longest) and rows.

    position_ids: (B, longest), or None for 0, 1, 2, ...
    """
    rotary = model.stack()[0].rotary
    if rotary is None:
        return STILL
    device, size = packing.length.device, model.width // model.stack()[0].heads
    tokens = torch.arange(packing.batch * packing.longest, device=device)
    if position_ids is None:
        cos, sin = rotary.table(torch.arange(packing.longest, device=device), size, wide)
        token_rows, rows = tokens % packing.longest, packing.row_token
    else:
        cos, sin = rotary.table(position_ids.flatten(), size, wide)
        token_rows, rows = tokens, packing.row_index
    return Turns(Rotation(cos, sin, token_rows), Rotation(cos, sin, rows))


def causal_layers(
    blocks: list[Block],
    rows: Tensor,
    half: torch.dtype,
    packing: Layout,
    prefix_length: int | Tensor,
    recompute: bool,
    turns: Turns,
) -> Tensor:
    """All blocks of a decoder on the rows (N, D) of whole sequences."""
    h, x = stream_start(rows, half), normed(rows, norm_of(blocks[0].norm_1), half)
    h, y = full_block(blocks[0], h, x, packing, recompute, turns, prefix_length)
    for before, block in itertools.pairwise(blocks):
        h, x = add_norm(h, y, bias_of(before.out), norm_of(block.norm_1))
        h, y = full_block(block, h, x, packing, recompute, turns, prefix_length)
    return stream_end(h, y, bias_of(blocks[-1].out))


def projected(block: Block, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """q, k, v of normed rows, (N, 3 D), turned if anything turns; and the bias in them."""
    qkv, bias = norm_linear(x, block.qkv, block.norm_1, add=True)
    if rotation is None:
        return qkv, bias
    return rotate(qkv, bias, rotation)


def full_block(
    block: Block,
    h: Stream,
    x: Tensor,
    packing: Layout,
    recompute: bool,
    turns: Turns,
    prefix_length: int | Tensor | None = None,
) -> tuple[Stream, Tensor]:
    """A block on every row: the stream, and the product that has yet to be added to it.

    x: the stream's normed rows.
    """
    qkv, bias = projected(block, x, turns.rows)
    attended = prefix_attention(qkv, bias, packing, block.heads, block.scale, prefix_length)
    y = linear(attended, block.proj.weight)
    h, x = add_norm(h, y, bias_of(block.proj), norm_of(block.norm_2))
    return h, mlp(block, x, recompute)


def first_layer(
    block: Block, h_BTD: Tensor, half: torch.dtype, packing: Packing, recompute: bool, turns: Turns
) -> tuple[Stream, Tensor]:
    """Layer 1 from tokens: the stream (N, D), and the product that has yet to be added to it."""
    tokens, norm = h_BTD.flatten(0, 1), norm_of(block.norm_1)
    if packing.one_per_sequence:
        # Each token at most once, so that gradients have an order.
        rows = tokens.index_select(0, packing.row_index)
        x = normed(rows, norm, half)
        return full_block(block, stream_start(rows, half), x, packing, recompute, turns)
    qkv, bias = projected(block, normed(tokens, norm, half), turns.tokens)
    y = linear(running_attention(qkv, bias, packing, block.heads, block.scale), block.proj.weight)
    h, x = first_add_norm(h_BTD, y, bias_of(block.proj), norm_of(block.norm_2), packing)
    return h, mlp(block, x, recompute)


def from_first_layer(
    model: Any, h: Tensor, attended: Tensor, packing: Layout, position_ids: Tensor | None = None
) -> Tensor:
    """All that follows layer 1's attention, from rows (N, D) of the stream and of it: (M, D).

    position_ids: (N,), of each row; only rotary positions need them.
    """
    blocks, device = model.stack(), h.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
    with torch.autocast(device, enabled=False):
        y = linear(attended.to(half), blocks[0].proj.weight)
        norm = norm_of(blocks[0].norm_2)
        stream, x = add_norm(stream_of(h, half), y, bias_of(blocks[0].proj), norm)
        turns = STILL
        if blocks[0].rotary is not None:
            assert position_ids is not None
            cos, sin = blocks[0].rotary.table(position_ids, model.width // blocks[0].heads, h.dtype)
            turns = Turns(None, Rotation(cos, sin, torch.arange(len(h), device=h.device)))
        return upper_layers(blocks, stream, mlp(blocks[0], x), packing, False, turns)


def mlp(block: Block, x: Tensor, recompute: bool = False) -> Tensor:
    """The block's MLP on normed rows, without the bias of its last product.

    recompute: compute its activations once more in the backward pass.
    """
    u, bias = norm_linear(x, block.fc, block.norm_2)
    kind = {nn.ReLU: RELU, nn.GELU: GELU, nn.SiLU: SILU}[type(block.activation)]
    return activated_linear(u, bias, block.out.weight, kind, recompute=recompute)


def upper_layers(
    blocks: list[Block], h: Stream, y: Tensor, packing: Layout, recompute: bool, turns: Turns
) -> Tensor:
    """Blocks 2..L, from the stream after block 1 without its last product y: (M, D)."""
    for before, block in itertools.pairwise(blocks[:-1]):
        h, x = add_norm(h, y, bias_of(before.out), norm_of(block.norm_1))
        h, y = full_block(block, h, x, packing, recompute, turns)
    last, before = blocks[-1], blocks[-2]
    h, x, ends = last_add_norm(h, y, bias_of(before.out), norm_of(last.norm_1), packing)
    return last_layer(last, h, x, ends, packing, turns)


def last_layer(
    block: Block, h: Stream, x_ND: Tensor, x_MD: Tensor, packing: Layout, turns: Turns
) -> Tensor:
    """The last block at the end of each prefix: (M, D).

    h: the stream there. x_ND, x_MD: all normed rows, and those there.
    """
    if turns.rows is None:
        weights = (block.qkv.weight, bias_of(block.qkv), *gain_and_shift(block.norm_1))
        y = LastAttention.apply(x_ND, x_MD, *weights, packing, block.heads, block.scale)
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
