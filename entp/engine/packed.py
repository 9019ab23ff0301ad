"""All prefixes at once in plain torch: the exact savings of docs/engine.md, on CPU and CUDA.

The rows of all wanted prefixes are packed one after the other, shortest prefixes first and without padding:

    prefix of sequence    a   b   a a   b b   a a a        prefixes of equal length stand together, so attention over a
    row (token)           0   0   0 1   0 1   0 1 2        group is one batched call without a mask

1. Embeddings and layer 1's q, k, v are computed once per token, not once per row.
2. Layer 1's attention of token i over keys 0..m-1 is, for all m together, a running softmax over keys.
3. The last layer has one query per prefix; its key and value projections move to the query's side of the products.
4. Linear layers see packed rows only.
5. Prefixes do not depend on each other, so `token_budget` may split them into chunks.

Names: B sequences, T tokens, M prefixes, N rows (the sum of prefix lengths), D width, H heads, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from entp.attention import attend
from entp.engine.layout import Packing, pack, positions_of
from entp.engine.running import at_least_fp32, running_attention

if TYPE_CHECKING:
    from entp.model import Block, Transformer


def prefix_hidden(model: Transformer, x: Tensor, wanted: Tensor) -> Tensor:
    """As reference.prefix_hidden: last block's output at the end of each wanted prefix, (M, D), sequence by sequence."""
    if model.config.layers == 1:  # one layer: encoder and decoder are the same function (paper, appendix)
        return model.hidden(x, "decoder").flatten(0, 1).index_select(0, positions_of(wanted, x.device))
    packing = pack(wanted, x.device)
    if not packing.groups:
        return model.embed(x)[wanted]
    h = model.embed(x[:, : packing.longest])
    rows = first_layer(model.blocks[0], h, packing)  # type: ignore[arg-type]
    out = upper_layers(model, rows, packing)
    return out.index_select(0, packing.caller_order)


def upper_layers(model: Transformer, rows_ND: Tensor, packing: Packing) -> Tensor:
    """Blocks 2..L on packed rows: full attention inside each prefix, one query per prefix in the last. Returns (M, D)."""
    for block in model.blocks[1:-1]:
        attended = prefix_attention(block, block.qkv(block.norm_1(rows_ND)), packing)  # type: ignore[operator,arg-type]
        rows_ND = block.finish(rows_ND, attended)  # type: ignore[operator]
    return last_layer(model.blocks[-1], rows_ND, packing)  # type: ignore[arg-type]


def first_layer(block: Block, h_BTD: Tensor, packing: Packing) -> Tensor:
    """Block 1 for every row (N, D), from the embeddings (B, T, D)."""
    if packing.alone:  # nothing to share: a block like any other
        rows = h_BTD.flatten(0, 1).index_select(0, packing.row_index)
        return block.finish(rows, prefix_attention(block, block.qkv(block.norm_1(rows)), packing))
    q, k, v = (part.transpose(1, 2) for part in block.split_heads(block.qkv(block.norm_1(h_BTD))))
    with torch.autocast(h_BTD.device.type, enabled=False):  # scores in full precision, as fused attention keeps them
        attended = running_attention(q, k, v, packing, block.scale)
    rows = F.embedding(packing.row_index, h_BTD.flatten(0, 1))  # its backward adds rows up in parallel and in a fixed order
    return block.finish(rows, attended)


def prefix_attention(block: Block, qkv: Tensor, packing: Packing) -> Tensor:
    """Full attention inside each prefix: (N, 3D) to (N, D)."""
    head_size = qkv.shape[-1] // (3 * block.heads)
    if qkv.is_cuda and qkv.dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= 256:
        return _varlen(block, qkv, packing)
    outputs = []
    for (m, count), part in zip(packing.groups, qkv.split(packing.row_counts), strict=True):
        q, k, v = (p.transpose(1, 2) for p in block.split_heads(part.unflatten(0, (count, m))))
        outputs.append(attend(q, k, v, scale=block.scale).transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(outputs)


def _varlen(block: Block, qkv: Tensor, packing: Packing) -> Tensor:
    """The same in one kernel for all lengths (CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (part.contiguous() for part in block.split_heads(qkv))
    bounds, longest = packing.bounds, packing.longest
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=block.scale)
    return out.flatten(1)  # type: ignore[union-attr]


def last_layer(block: Block, rows_ND: Tensor, packing: Packing) -> Tensor:
    """The last block at the end of each prefix only, (M, D) from (N, D).

    Per head, q k_i = (W_K^T q) x_i + a constant, which softmax ignores, and sum_i a_i v_i = W_V (sum_i a_i x_i) + b_V: keys
    and values of the N rows are never computed.
    """
    last = packing.last_row
    with torch.autocast(rows_ND.device.type, enabled=False):  # few rows: full precision costs nothing and rounds once less
        attended = _last_attention(block, at_least_fp32(block.norm_1(rows_ND)), packing, last)
    return block.finish(rows_ND[last], attended.to(rows_ND.dtype))


def _last_attention(block: Block, x_ND: Tensor, packing: Packing, last: Tensor) -> Tensor:
    """Attention of each prefix's last row over its rows x (N, D), which are normed but not projected: (M, D)."""
    w_q, w_k, w_v = at_least_fp32(block.qkv.weight).unflatten(0, (3, block.heads, -1)).unbind(0)  # (H, d, D) each
    b_q, _, b_v = at_least_fp32(block.qkv.bias).unflatten(0, (3, block.heads, -1)).unbind(0)
    q_MHd = torch.einsum("md,hed->mhe", x_ND[last], w_q) + b_q
    q_MHD = torch.einsum("mhe,hed->mhd", q_MHd * block.scale, w_k)
    context_MHD = query_attention(x_ND, q_MHD, packing)
    return (torch.einsum("mhd,hed->mhe", context_MHD, w_v) + b_v).flatten(1)


def query_attention(x_ND: Tensor, q_MHD: Tensor, packing: Packing) -> Tensor:
    """Contexts (M, H, D): one scaled query per prefix and head over the prefix's rows, which are keys and values at once."""
    contexts = []
    counts = [count for _, count in packing.groups]
    for (m, count), x, q in zip(packing.groups, x_ND.split(packing.row_counts), q_MHD.split(counts), strict=True):
        x = x.unflatten(0, (count, m))
        contexts.append(torch.softmax(q @ x.transpose(1, 2), dim=-1) @ x)
    return torch.cat(contexts)
