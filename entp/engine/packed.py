"""All prefixes at once, for any model of protocol.py: its own modules on packed rows.

Attention is plain torch, and on CUDA our kernels (triton/any_model.py), which read no weights. With
a bias on scores it is torch's everywhere.

The rows of all prefixes are packed one after the other, shortest prefixes first and without
padding. Prefixes of equal length stand together: attention over a group needs no mask.

    prefix of sequence    a   b   a a   b b   a a a
    row (token)           0   0   0 1   0 1   0 1 2

The exact savings of docs/engine.md:
1. Embeddings and layer 1's q, k, v are computed once per token, not once per row.
2. Layer 1's attention of token i over keys 0..m-1 is an online softmax, for all m together.
3. The last layer has one query per prefix. Where its weights may be read (support.absorbs), its
   key and value projections move to the query's side of the products.
4. Linear layers see packed rows only.
5. Prefixes do not depend on each other, so `token_budget` may split them into chunks.

Names: B sequences, T tokens, M prefixes, N rows (the sum of prefix lengths), D width, H heads,
d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from entp.engine.devices import LARGEST_HEAD, attention_kernels
from entp.engine.layout import Packing, pack, positions_of
from entp.engine.masks import attend
from entp.engine.online_softmax import at_least_fp32, running_attention
from entp.engine.protocol import BlockProtocol, ModelProtocol, attention_biases
from entp.engine.support import absorbs

MOST_TILE = 128
"""Longer prefixes take torch's attention in half precision: our kernel holds no more in a tile."""


class Positions(NamedTuple):
    """Positions of tokens and rows, and the bias that follows from them."""

    ids: Tensor
    """(B, T) or (T,) position ids of tokens."""
    row_ids: Tensor
    """(N,) position ids of rows."""
    biases: Sequence[Tensor | None]
    """For each layer (B or 1, H or 1, T, T) added to attention scores, or None."""


def prefix_hidden(
    model: ModelProtocol, x: Tensor, target_mask: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """As reference.prefix_hidden: the last block's output at the end of each prefix, (M, D)."""
    packing = pack(target_mask, x.device)
    if not packing.groups:
        return model.embed(x, position_ids).flatten(0, 1)[:0]
    blocks = model.stack()
    if len(blocks) == 1:  # one layer: encoder and decoder are the same function (paper, appendix)
        hidden = causal_hidden(model, x, position_ids)
        return hidden.flatten(0, 1).index_select(0, positions_of(target_mask, x.device))
    ids = None if position_ids is None else position_ids[:, : packing.longest]
    h = model.embed(x[:, : packing.longest], ids)
    positions = make_positions(model, packing, ids)
    rows = first_layer(blocks[0], h, packing, positions)
    out = upper_layers(model, rows, packing, positions)
    return out.index_select(0, packing.caller_order)


def causal_hidden(model: ModelProtocol, x: Tensor, position_ids: Tensor | None) -> Tensor:
    """A decoder's last block (B, T, D), by project and finish."""
    ids = torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids
    h, biases = model.embed(x, position_ids), attention_biases(model, ids, ids)
    for block, bias in zip(model.stack(), biases, strict=True):
        q, k, v = (x.transpose(1, 2) for x in block.project(h, ids))
        attended = attend(q, k, v, scale=block.scale, causal=True, bias=bias)
        h = block.finish(h, attended.transpose(1, 2).flatten(2))
    return h


def make_positions(
    model: ModelProtocol, packing: Packing, position_ids: Tensor | None
) -> Positions:
    """Positions in a packing; position_ids: (B, longest), or None for 0, 1, 2, ..."""
    if position_ids is None:
        ids = torch.arange(packing.longest, device=packing.length.device)
        row_ids = packing.row_token
    else:
        ids = position_ids
        row_ids = position_ids.flatten().index_select(0, packing.row_index)
    return Positions(ids, row_ids, attention_biases(model, ids, ids))


def upper_layers(
    model: ModelProtocol, rows_ND: Tensor, packing: Packing, positions: Positions
) -> Tensor:
    """Blocks 2..L on packed rows, the last at the end of each prefix only: (M, D)."""
    *middle, last = model.stack()[1:]
    for block, bias in zip(middle, positions.biases[1:-1], strict=True):
        rows_ND = full_block(block, rows_ND, packing, positions, bias)
    # Kernels read keys and values in one launch; the absorbed form takes some for each length.
    kernels = attention_kernels(rows_ND.device, LARGEST_HEAD)
    absorbed = isinstance(model, torch.nn.Module) and not kernels and absorbs(model)
    return last_layer(last, rows_ND, packing, positions, absorbed)


def full_block(
    block: BlockProtocol,
    rows_ND: Tensor,
    packing: Packing,
    positions: Positions,
    bias: Tensor | None,
) -> Tensor:
    """A block on every row: full attention inside each prefix."""
    q, k, v = block.project(rows_ND, positions.row_ids)
    return block.finish(rows_ND, prefix_attention(q, k, v, packing, block.scale, bias))


def first_layer(
    block: BlockProtocol, h_BTD: Tensor, packing: Packing, positions: Positions
) -> Tensor:
    """Block 1 for every row (N, D), from the embeddings (B, T, D)."""
    bias = positions.biases[0]
    if packing.one_per_sequence:  # nothing to share: a block like any other
        rows = h_BTD.flatten(0, 1).index_select(0, packing.row_index)
        return full_block(block, rows, packing, positions, bias)
    q, k, v = block.project(h_BTD, positions.ids)
    # Scores in full precision, as fused attention keeps them.
    with torch.autocast(h_BTD.device.type, enabled=False):
        attended = first_attention(q, k, v, packing, block.scale, bias)
    # The backward pass of F.embedding adds rows up in parallel and in a fixed order.
    rows = F.embedding(packing.row_index, h_BTD.flatten(0, 1))
    return block.finish(rows, attended)


def first_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Layer 1's for every row: q (B, T, H, d), k and v (B, T, KV, d) of tokens to (N, H d)."""
    if bias is None and attention_kernels(q.device, q.shape[-1]):
        from entp.engine.triton import any_model

        return any_model.first_attention(q, *_shared(q, k, v), packing, scale)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return running_attention(q, k, v, packing, scale, bias)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Full attention inside each prefix: q (N, H, d), k and v (N, KV, d) to (N, H d)."""
    size = q.shape[-1]
    half = q.dtype in (torch.bfloat16, torch.float16)
    fused = q.is_cuda and half and size % 8 == 0 and size <= 256 and bias is None
    if fused and packing.longest > MOST_TILE:
        return _varlen(q, k, v, packing, scale)
    if bias is None and attention_kernels(q.device, size):
        from entp.engine.triton import any_model

        return any_model.prefix_attention(q, *_shared(q, k, v), packing, scale)
    if fused:
        return _varlen(q, k, v, packing, scale)
    outputs = []
    by_group = (x.split(packing.row_counts) for x in (q, k, v))
    for (m, count), sequences, *qkv in zip(
        packing.groups, _groups_of(packing), *by_group, strict=True
    ):
        one, two, three = (x.unflatten(0, (count, m)).transpose(1, 2) for x in qkv)
        own = None if bias is None else _bias_of(bias, sequences, m)
        attended = attend(one, two, three, scale=scale, bias=own)
        outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(outputs)


def _shared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with as many heads as q, and of one type; heads are the last dimension but one."""
    groups = q.shape[-2] // k.shape[-2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=-2) for x in (k, v))
    return k.to(q.dtype), v.to(q.dtype)


def _groups_of(packing: Packing) -> tuple[Tensor, ...]:
    """The sequences of each group of equal lengths."""
    return packing.sequence.split([count for _, count in packing.groups])


def _bias_of(bias: Tensor, sequences: Tensor, m: int) -> Tensor:
    """The bias of prefixes of length m of these sequences."""
    if len(bias) > 1:
        bias = bias.index_select(0, sequences)
    return bias[:, :, :m, :m]


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """The same in one kernel for all lengths (CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x.contiguous() for x in (q, *_shared(q, k, v)))
    bounds, longest = packing.bounds, packing.longest
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale)
    return out.flatten(1)  # type: ignore[union-attr]


def last_layer(
    block: BlockProtocol,
    rows_ND: Tensor,
    packing: Packing,
    positions: Positions,
    absorbed: bool = False,
) -> Tensor:
    """The last block at the end of each prefix only, (M, D) from (N, D)."""
    last = packing.last_row
    if absorbed:
        # Few rows: full precision costs nothing and rounds once less.
        with torch.autocast(rows_ND.device.type, enabled=False):
            attended = _absorbed_attention(block, rows_ND, packing, last)
    else:
        q, k, v = block.project(rows_ND, positions.row_ids)
        q = q.index_select(0, last)
        attended = last_attention(q, k, v, packing, block.scale, positions.biases[-1])
    return block.finish(rows_ND.index_select(0, last), attended.to(rows_ND.dtype))


def last_attention(
    q_MHd: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Attention of one query per prefix over its rows' keys and values (N, KV, d): (M, H d)."""
    if bias is None and attention_kernels(q_MHd.device, q_MHd.shape[-1]):
        from entp.engine.triton import any_model

        return any_model.last_attention(q_MHd, *_shared(q_MHd, k, v), packing, scale)
    outputs = []
    queries = q_MHd.split([count for _, count in packing.groups])
    by_group = (x.split(packing.row_counts) for x in (k, v))
    for (m, count), sequences, query, *kv in zip(
        packing.groups, _groups_of(packing), queries, *by_group, strict=True
    ):
        keys, values = (x.unflatten(0, (count, m)).transpose(1, 2) for x in kv)
        own = None if bias is None else _bias_of(bias, sequences, m)[:, :, -1:]
        outputs.append(attend(query[:, :, None], keys, values, scale=scale, bias=own).flatten(1))
    return torch.cat(outputs)


def _absorbed_attention(block: Any, rows_ND: Tensor, packing: Packing, last: Tensor) -> Tensor:
    """The same where the weights may be read, (M, D).

    Per head, q k_i = (W_K^T q) x_i + a constant, which softmax ignores, and sum_i a_i v_i = W_V
    (sum_i a_i x_i) + b_V: keys and values of the N rows are never computed.
    """
    if block.pre_norm:
        rows_ND = block.norm_1(rows_ND)
    x_ND = at_least_fp32(rows_ND)
    w_q, w_k, w_v = _by_head(block, at_least_fp32(block.qkv.weight))  # (H, d, D) each
    q_MHd = torch.einsum("md,hed->mhe", x_ND[last], w_q)
    b_v = None
    if block.qkv.bias is not None:
        b_q, _, b_v = _by_head(block, at_least_fp32(block.qkv.bias))
        q_MHd = q_MHd + b_q
    q_MHD = torch.einsum("mhe,hed->mhd", q_MHd * block.scale, w_k)
    context_MHD = query_attention(x_ND, q_MHD, packing)
    attended = torch.einsum("mhd,hed->mhe", context_MHD, w_v)
    if b_v is not None:
        attended = attended + b_v
    return attended.flatten(1)


def _by_head(block: Any, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the q, k, v matrix (or its bias) as (H, d, ...) each; shared heads are repeated."""
    groups = [block.heads, block.kv_heads, block.kv_heads]
    q, k, v = weights.unflatten(0, (sum(groups), -1)).split(groups)
    if block.kv_heads != block.heads:
        k, v = (x.repeat_interleave(block.heads // block.kv_heads, dim=0) for x in (k, v))
    return q, k, v


def query_attention(x_ND: Tensor, q_MHD: Tensor, packing: Packing) -> Tensor:
    """Contexts (M, H, D): a scaled query per prefix and head over rows that are keys and values."""
    contexts = []
    counts = [count for _, count in packing.groups]
    for (m, count), x, q in zip(
        packing.groups, x_ND.split(packing.row_counts), q_MHD.split(counts), strict=True
    ):
        x = x.unflatten(0, (count, m))
        contexts.append(torch.softmax(q @ x.transpose(1, 2), dim=-1) @ x)
    return torch.cat(contexts)
