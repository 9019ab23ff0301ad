"""All prefixes on a GPU: the same savings as packed.py, in kernels that each pass over the rows once.

What flows between kernels is the residual stream h in fp32 (its gradient in half precision) and, for the matrix products,
normed rows x in half precision. A block reads, from the products y of the block before it:

    h, x = add_norm(h, y)     attention = prefix_attention(norm_linear(x))      y = linear(attention)
    h, x = add_norm(h, y)                                                       y = activated_linear(norm_linear(x))

Layer 1 takes h from tokens and its attention from a scan, unless each sequence has one prefix only; the last layer reads h at
the end of each prefix only.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from entp.engine import packed
from entp.engine.budget import memory_counts
from entp.engine.layout import Layout, Packing, pack, whole_sequences
from entp.engine.triton.attention import prefix_attention
from entp.engine.triton.embed import embed
from entp.engine.triton.last import LastAttention
from entp.engine.triton.linear import linear, norm_linear
from entp.engine.triton.mlp import activated_linear
from entp.engine.triton.rows import (
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
from entp.engine.triton.running import running_attention

if TYPE_CHECKING:
    from entp.model import Block, Transformer


def prefix_hidden(model: Transformer, x: Tensor, wanted: Tensor, generous: bool = False) -> Tensor:
    """As reference.prefix_hidden: last block's output at the end of each wanted prefix, (M, D), sequence by sequence.

    generous: keep activations for the backward pass however many rows there are.
    """
    if model.config.layers == 1 or not bool(wanted.any()):
        return packed.prefix_hidden(model, x, wanted)  # no rows of prefixes to compute
    packing = pack(wanted, x.device)
    blocks = cast("list[Block]", list(model.blocks))
    device = x.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    h = embed(model, x[:, : packing.longest])
    h = h.to(torch.promote_types(h.dtype, torch.float32))
    with torch.autocast(device, enabled=False):
        keep = generous or not memory_counts(model.config, packing.rows)
        out = upper_layers(blocks, *first_layer(blocks[0], h, half or h.dtype, packing, keep), packing, keep)
    return out.index_select(0, packing.caller_order)


def causal_hidden(model: Transformer, x: Tensor, free: int | Tensor) -> Tensor:
    """A decoder's last block (B, T, D) by the same kernels: one prefix per sequence, in which key j is seen by i if
    j <= max(i, free - 1). free: a number, or (B,) on the device, one for each sequence."""
    blocks = cast("list[Block]", list(model.blocks))
    device = x.device.type
    packing = whole_sequences(x.shape[0], x.shape[1], x.device)
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    h = embed(model, x)
    rows = h.to(torch.promote_types(h.dtype, torch.float32)).flatten(0, 1)
    with torch.autocast(device, enabled=False):
        keep = not memory_counts(model.config, packing.rows)
        out = causal_layers(blocks, rows, half or rows.dtype, packing, free, keep)
    return out.view(h.shape)


def causal_layers(
    blocks: list[Block], rows: Tensor, half: torch.dtype, packing: Layout, free: int | Tensor, keep: bool
) -> Tensor:
    """All blocks of a decoder on the rows (N, D) of whole sequences."""
    h, x = stream_start(rows, half), normed(rows, norm_of(blocks[0].norm_1), half)
    h, y = full_block(blocks[0], h, x, packing, keep, free)
    for before, block in itertools.pairwise(blocks):
        h, x = add_norm(h, y, before.out.bias, norm_of(block.norm_1))
        h, y = full_block(block, h, x, packing, keep, free)
    return stream_end(h, y, blocks[-1].out.bias)


def full_block(
    block: Block, h: Stream, x: Tensor, packing: Layout, keep: bool, free: int | Tensor | None = None
) -> tuple[Stream, Tensor]:
    """A block on every row, from the stream and its normed rows: the stream, and the product that has yet to be added to it."""
    qkv, bias = norm_linear(x, block.qkv, block.norm_1, add=True)
    y = linear(prefix_attention(qkv, bias, packing, block.heads, block.scale, free), block.proj.weight)
    h, x = add_norm(h, y, block.proj.bias, norm_of(block.norm_2))
    return h, mlp(block, x, keep)


def first_layer(block: Block, h_BTD: Tensor, half: torch.dtype, packing: Packing, keep: bool) -> tuple[Stream, Tensor]:
    """Layer 1 from tokens: the stream (N, D), and the product that has yet to be added to it; keep: see mlp."""
    if packing.alone:
        rows = h_BTD.flatten(0, 1).index_select(0, packing.row_index)  # each at most once, so that gradients have an order
        return full_block(block, stream_start(rows, half), normed(rows, norm_of(block.norm_1), half), packing, keep)
    x = normed(h_BTD.flatten(0, 1), norm_of(block.norm_1), half)
    qkv, bias = norm_linear(x, block.qkv, block.norm_1, add=True)
    y = linear(running_attention(qkv, bias, packing, block.heads, block.scale), block.proj.weight)
    h, x = first_add_norm(h_BTD, y, block.proj.bias, norm_of(block.norm_2), packing)
    return h, mlp(block, x, keep)


def from_first_layer(model: Transformer, h: Tensor, attended: Tensor, packing: Layout) -> Tensor:
    """All that follows layer 1's attention, where each row (N, D) of the stream and of the attention is at hand: (M, D)."""
    blocks, device = cast("list[Block]", list(model.blocks)), h.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
    with torch.autocast(device, enabled=False):
        y = linear(attended.to(half), blocks[0].proj.weight)
        stream, x = add_norm(stream_of(h, half), y, blocks[0].proj.bias, norm_of(blocks[0].norm_2))
        return upper_layers(blocks, stream, mlp(blocks[0], x), packing)


def mlp(block: Block, x: Tensor, keep: bool = True) -> Tensor:
    """The block's MLP on normed rows, without the bias of its last product; keep its activations for the backward pass?"""
    u, bias = norm_linear(x, block.fc, block.norm_2)
    return activated_linear(u, bias, block.out.weight, isinstance(block.activation, nn.GELU), keep=keep)


def upper_layers(blocks: list[Block], h: Stream, y: Tensor, packing: Layout, keep: bool = True) -> Tensor:
    """Blocks 2..L, from the stream after block 1 without its last product y: (M, D); keep: see mlp."""
    for before, block in itertools.pairwise(blocks[:-1]):
        h, x = add_norm(h, y, before.out.bias, norm_of(block.norm_1))
        h, y = full_block(block, h, x, packing, keep)
    return last_layer(blocks[-1], *last_add_norm(h, y, blocks[-2].out.bias, norm_of(blocks[-1].norm_1), packing), packing)


def last_layer(block: Block, h: Stream, x_ND: Tensor, x_MD: Tensor, packing: Layout) -> Tensor:
    """The last block at the end of each prefix, from the stream there and the normed rows, all and there: (M, D)."""
    gain, shift = (block.norm_1.weight, block.norm_1.bias) if isinstance(block.norm_1, nn.LayerNorm) else (None, None)
    y = LastAttention.apply(
        x_ND, x_MD, block.qkv.weight, block.qkv.bias, gain, shift, packing, block.heads, block.scale
    )  # fmt: skip
    h, x = add_norm(h, linear(y, block.proj.weight), block.proj.bias, norm_of(block.norm_2))
    return stream_end(h, mlp(block, x), block.out.bias)


def norm_of(norm: nn.Module) -> Norm:
    """What kernels need to know of a norm."""
    return Norm(True, norm.eps) if isinstance(norm, nn.LayerNorm) else Norm(False, 0.0)
