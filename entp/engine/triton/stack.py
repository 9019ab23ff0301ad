"""All prefixes on a GPU: the same savings as packed.py, in kernels that each pass over the rows once.

What flows between kernels is the residual stream h in fp32 and, for the matrix products, normed rows x in half precision. A
block reads, from the products y of the block before it:

    h, x = add_norm(h, y)     attention = prefix_attention(norm_linear(x))      y = linear(attention)
    h, x = add_norm(h, y)     a = activate(norm_linear(x))                      y = linear(a)

Layer 1 takes h from tokens and its attention from a scan; the last layer reads h at the end of each prefix only.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from entp.engine.layout import Packing, pack, positions_of
from entp.engine.triton.attention import prefix_attention
from entp.engine.triton.last import query_attention
from entp.engine.triton.linear import linear, norm_linear
from entp.engine.triton.rows import Norm, activate, add_norm, first_add_norm, last_add_norm
from entp.engine.triton.running import running_attention

if TYPE_CHECKING:
    from entp.model import Block, Transformer


def prefix_hidden(model: Transformer, x: Tensor, wanted: Tensor) -> Tensor:
    """As reference.prefix_hidden: last block's output at the end of each wanted prefix, (M, D), sequence by sequence."""
    if model.config.layers == 1:  # one layer: encoder and decoder are the same function (paper, appendix)
        return model.hidden(x, "decoder").flatten(0, 1).index_select(0, positions_of(wanted, x.device))
    packing = pack(wanted, x.device)
    if not packing.groups:
        return model.embed(x)[wanted]
    blocks = cast("list[Block]", list(model.blocks))
    device = x.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    h = model.embed(x[:, : packing.longest])
    h = h.to(torch.promote_types(h.dtype, torch.float32))
    y = first_attention(blocks[0], h, packing)
    with torch.autocast(device, enabled=False):
        h, y = first_layer(blocks[0], h, y.to(half or h.dtype), packing)
        out = upper_layers(blocks, h, y, packing)
    return out.index_select(0, packing.caller_order)


def first_attention(block: Block, h_BTD: Tensor, packing: Packing) -> Tensor:
    """Layer 1's attention for every row, (N, D)."""
    q, k, v = (part.transpose(1, 2) for part in block.split_heads(block.qkv(block.norm_1(h_BTD))))
    with torch.autocast(h_BTD.device.type, enabled=False):
        return running_attention(q, k, v, packing, block.scale)


def first_layer(block: Block, h_BTD: Tensor, attended: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """The rest of layer 1: the stream (N, D), and the product that has yet to be added to it."""
    y = linear(attended, block.proj.weight)
    h, x = first_add_norm(h_BTD, y, block.proj.bias, _norm(block.norm_2), packing)
    return h, mlp(block, x)


def mlp(block: Block, x: Tensor) -> Tensor:
    """The block's MLP on normed rows, without the bias of its last product."""
    u, bias = norm_linear(x, block.fc, block.norm_2)
    return linear(activate(u, bias, isinstance(block.activation, nn.GELU)), block.out.weight)


def upper_layers(blocks: list[Block], h: Tensor, y: Tensor, packing: Packing) -> Tensor:
    """Blocks 2..L, from the stream after block 1 without its last product y: (M, D)."""
    for before, block in itertools.pairwise(blocks[:-1]):
        h, x = add_norm(h, y, before.out.bias, _norm(block.norm_1))
        qkv, bias = norm_linear(x, block.qkv, block.norm_1, add=True)
        y = linear(prefix_attention(qkv, bias, packing, block.heads, block.scale), block.proj.weight)
        h, x = add_norm(h, y, block.proj.bias, _norm(block.norm_2))
        y = mlp(block, x)
    return last_layer(blocks[-1], *last_add_norm(h, y, blocks[-2].out.bias, _norm(blocks[-1].norm_1), packing), packing)


def last_layer(block: Block, h_MD: Tensor, x_ND: Tensor, packing: Packing) -> Tensor:
    """The last block at the end of each prefix, from the stream there and the normed rows of all: (M, D).

    As packed.last_layer, with the norm's gain and shift on the prefix's side too: gain (W_K^T q) takes the place of W_K^T q,
    and gain c + shift that of the context c.
    """
    norm, half = block.norm_1, x_ND.dtype != h_MD.dtype
    w_q, w_k, w_v = block.qkv.weight.unflatten(0, (3, block.heads, -1)).unbind(0)  # (H, d, D) each
    b_q, _, b_v = block.qkv.bias.unflatten(0, (3, block.heads, -1)).unbind(0)
    with torch.autocast(h_MD.device.type, dtype=x_ND.dtype if half else None, enabled=half):
        q_MHd = torch.einsum("md,hed->mhe", norm(h_MD), w_q) + b_q
        q_MHD = torch.einsum("mhe,hed->mhd", q_MHd * block.scale, w_k)
        if isinstance(norm, nn.LayerNorm):
            q_MHD = q_MHD * norm.weight
        context_MHD = query_attention(x_ND, q_MHD.to(h_MD.dtype), packing)
        if isinstance(norm, nn.LayerNorm):
            context_MHD = context_MHD * norm.weight + norm.bias
        attended = torch.einsum("mhd,hed->mhe", context_MHD, w_v) + b_v
        return block.finish(h_MD, attended.flatten(1))


def _norm(norm: nn.Module) -> Norm:
    return Norm(True, norm.eps) if isinstance(norm, nn.LayerNorm) else Norm(False, 0.0)
