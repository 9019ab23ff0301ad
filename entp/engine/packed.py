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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from entp.attention import attend

if TYPE_CHECKING:
    from entp.model import Block, Transformer

BLOCK = 16
"""Lengths handled together in layer 1's running softmax."""


@dataclass(frozen=True)
class Packing:
    """Which prefixes are computed, and how their rows are laid out."""

    sequence: Tensor
    """(M,) the sequence of each prefix, in packed order: by length, then by sequence."""
    length: Tensor
    """(M,) its length."""
    groups: tuple[tuple[int, int], ...]
    """(length, how many prefixes) for each length that occurs, ascending."""

    @property
    def rows(self) -> int:
        return sum(m * count for m, count in self.groups)

    @property
    def row_counts(self) -> list[int]:
        return [m * count for m, count in self.groups]

    def row_prefix(self) -> Tensor:
        """(N,) the packed index of each row's prefix."""
        return torch.repeat_interleave(self.length, output_size=self.rows)

    def row_token(self) -> Tensor:
        """(N,) each row's position inside its prefix."""
        first = self.length.cumsum(0) - self.length
        return torch.arange(self.rows, device=self.length.device) - first[self.row_prefix()]

    def last_row(self) -> Tensor:
        """(M,) the row at the end of each prefix: where its prediction is read."""
        return self.length.cumsum(0) - 1

    def bounds(self) -> Tensor:
        """(M + 1,) int32 first rows, as variable-length attention kernels want them."""
        return F.pad(self.length.cumsum(0), (1, 0)).to(torch.int32)


def pack(wanted: Tensor, device: torch.device | None = None) -> Packing:
    """The packing of the prefixes marked in wanted (B, T), its tensors on `device`."""
    time_major = wanted.T.contiguous()
    length, sequence = time_major.nonzero(as_tuple=True)
    counts = time_major.sum(1).tolist()
    groups = tuple((t + 1, n) for t, n in enumerate(counts) if n)
    return Packing(sequence.to(device, non_blocking=True), (length + 1).to(device, non_blocking=True), groups)


def split(wanted: Tensor, token_budget: int) -> Iterator[Tensor]:
    """Disjoint masks that add up to wanted, each of at most token_budget rows (or one prefix, if that alone is longer)."""
    length, sequence = wanted.T.nonzero(as_tuple=True)
    ends = (length + 1).cumsum(0)
    start = 0
    while start < len(length):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(torch.searchsorted(ends, before + token_budget, right=True)))
        chunk = torch.zeros_like(wanted)
        chunk[sequence[start:stop], length[start:stop]] = True
        yield chunk
        start = stop


def prefix_hidden(model: Transformer, x: Tensor, wanted: Tensor) -> Tensor:
    """As reference.prefix_hidden: last block's output at the end of each wanted prefix, (M, D), sequence by sequence."""
    if model.config.layers == 1:  # one layer: encoder and decoder are the same function (paper, appendix)
        return model.hidden(x, "decoder")[wanted]
    packing = pack(wanted, x.device)
    if not packing.groups:
        return model.embed(x)[wanted]
    h = model.embed(x[:, : packing.groups[-1][0]])
    rows = first_layer(model.blocks[0], h, packing)  # type: ignore[arg-type]
    out = upper_layers(model, rows, packing)
    caller_order = torch.argsort(packing.sequence * x.shape[1] + packing.length)
    return out[caller_order]


def upper_layers(model: Transformer, rows_ND: Tensor, packing: Packing) -> Tensor:
    """Blocks 2..L on packed rows: full attention inside each prefix, one query per prefix in the last. Returns (M, D)."""
    for block in model.blocks[1:-1]:
        attended = prefix_attention(block, block.qkv(block.norm_1(rows_ND)), packing)  # type: ignore[operator,arg-type]
        rows_ND = block.finish(rows_ND, attended)  # type: ignore[operator]
    return last_layer(model.blocks[-1], rows_ND, packing)  # type: ignore[arg-type]


def first_layer(block: Block, h_BTD: Tensor, packing: Packing) -> Tensor:
    """Block 1 for every row (N, D), from the embeddings (B, T, D)."""
    q, k, v = (part.transpose(1, 2) for part in block.split_heads(block.qkv(block.norm_1(h_BTD))))
    with torch.autocast(h_BTD.device.type, enabled=False):  # scores in full precision, as fused attention keeps them
        attended = running_attention(q, k, v, packing, block.scale)
    token = packing.sequence[packing.row_prefix()] * h_BTD.shape[1] + packing.row_token()
    rows = F.embedding(token, h_BTD.flatten(0, 1))  # its backward adds rows up in parallel and in a fixed order
    return block.finish(rows, attended)


def running_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """Attention of token i over keys 0..m-1 for every row (prefix of length m, token i): (N, H d) from (B, H, T, d).

    With s_ij = scale q_i k_j and z_im = log sum_{j<m} exp s_ij, the output o_im = sum_{j<m} exp(s_ij - z_im) v_j obeys
    o_im = exp(z_i,m' - z_im) o_im' + sum_{m'<=j<m} exp(s_ij - z_im) v_j for any m' < m. Every exponent is at most 0, so
    nothing overflows. Lengths are taken in blocks of BLOCK: the state o_im' is carried from block to block.
    """
    out_dtype = v.dtype
    q, k, v = (_at_least_fp32(part) for part in (q, k, v))
    scores = (q * scale) @ k.transpose(-1, -2)
    total = torch.logcumsumexp(scores, dim=-1)
    state = v.new_zeros(v.shape)
    pieces = []
    wanted = {m for m, _ in packing.groups}
    sequences = iter(packing.sequence.split([count for _, count in packing.groups]))
    for start in range(0, scores.shape[-1], BLOCK):
        stop = min(start + BLOCK, scores.shape[-1])
        keys = slice(start, stop)
        lengths = [m for m in range(start + 1, stop + 1) if m in wanted]
        if lengths:
            ends = torch.tensor(lengths, device=v.device) - 1
            dense = _block_outputs(scores, total, v, state, keys, ends)
            pieces.append(_valid_rows(dense, lengths, [next(sequences) for _ in lengths]))
        kept = torch.exp(total[..., start - 1] - total[..., stop - 1])[..., None] * state if start else 0
        state = kept + torch.exp(scores[..., keys] - total[..., stop - 1, None]) @ v[:, :, keys]
    return torch.cat(pieces).to(out_dtype)


def _block_outputs(scores: Tensor, total: Tensor, v: Tensor, state: Tensor, keys: slice, ends: Tensor) -> Tensor:
    """Running attention after each key in `ends`, all in the block `keys`: (lengths, B, tokens up to the block's end, H, d)."""
    tokens = slice(0, keys.stop)
    z = total[:, :, tokens].index_select(-1, ends)[..., None]  # (B, H, i, lengths, 1)
    later = torch.arange(keys.start, keys.stop, device=v.device) > ends[:, None]
    weight = torch.exp((scores[:, :, tokens, None, keys] - z).masked_fill(later, float("-inf")))
    dense = (weight.flatten(2, 3) @ v[:, :, keys]).unflatten(2, weight.shape[2:4])
    if keys.start:
        carried = torch.exp(total[:, :, tokens, keys.start - 1, None, None] - z)
        dense = dense + carried * state[:, :, tokens, None]
    return dense.permute(3, 0, 2, 1, 4)


def _valid_rows(dense: Tensor, lengths: list[int], sequences: list[Tensor]) -> Tensor:
    """Packed rows out of (lengths, B, i, H, d): for each length m the asked sequences' tokens 0..m-1."""
    _, batch, tokens = dense.shape[:3]
    index = [
        ((at * batch + rows)[:, None] * tokens + torch.arange(m, device=dense.device)).flatten()
        for at, (m, rows) in enumerate(zip(lengths, sequences, strict=True))
    ]
    return _TakeRows.apply(dense.reshape(-1, dense.shape[3] * dense.shape[4]), torch.cat(index))


class _TakeRows(torch.autograd.Function):
    """x[index] for an index without repeats: backward copies rows instead of adding them up."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, index, grad), None


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
    bounds, longest = packing.bounds(), packing.groups[-1][0]
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=block.scale)
    return out.flatten(1)  # type: ignore[union-attr]


def last_layer(block: Block, rows_ND: Tensor, packing: Packing) -> Tensor:
    """The last block at the end of each prefix only, (M, D) from (N, D).

    Per head, q k_i = (W_K^T q) x_i + a constant, which softmax ignores, and sum_i a_i v_i = W_V (sum_i a_i x_i) + b_V: keys
    and values of the N rows are never computed.
    """
    last = packing.last_row()
    with torch.autocast(rows_ND.device.type, enabled=False):  # few rows: full precision costs nothing and rounds once less
        attended = _last_attention(block, _at_least_fp32(block.norm_1(rows_ND)), packing, last)
    return block.finish(rows_ND[last], attended.to(rows_ND.dtype))


def _last_attention(block: Block, x_ND: Tensor, packing: Packing, last: Tensor) -> Tensor:
    """Attention of each prefix's last row over its rows x (N, D), which are normed but not projected: (M, D)."""
    w_q, w_k, w_v = _at_least_fp32(block.qkv.weight).unflatten(0, (3, block.heads, -1)).unbind(0)  # (H, d, D) each
    b_q, _, b_v = _at_least_fp32(block.qkv.bias).unflatten(0, (3, block.heads, -1)).unbind(0)
    q_MHd = torch.einsum("md,hed->mhe", x_ND[last], w_q) + b_q
    q_MHD = torch.einsum("mhe,hed->mhd", q_MHd * block.scale, w_k)
    contexts = []
    counts = [count for _, count in packing.groups]
    for (m, count), x, q in zip(packing.groups, x_ND.split(packing.row_counts), q_MHD.split(counts), strict=True):
        x = x.unflatten(0, (count, m))
        contexts.append(torch.softmax(q @ x.transpose(1, 2), dim=-1) @ x)
    return (torch.einsum("mhd,hed->mhe", torch.cat(contexts), w_v) + b_v).flatten(1)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
