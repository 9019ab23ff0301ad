"""Layer 1's attention for all prefixes at once: an online softmax over keys, with its gradients.

With s_ij = scale q_i k_j and z_im = log sum_{j<m} exp s_ij, row (prefix of length m, token i) has
the output o_im = sum_{j<m} exp(s_ij - z_im) v_j, and for any m' < m

    o_im = exp(z_im' - z_im) o_im' + sum_{m'<=j<m} exp(s_ij - z_im) v_j.

Backward, with g_im the gradient of o_im: ds_ij = sum_{m>j} exp(s_ij - z_im) (g_im v_j - g_im o_im),
and dv_j likewise with g_im alone. What lengths beyond m' contribute to keys before m' is carried
the other way, as sums of exp(z_im' - z_im) g_im and of exp(z_im' - z_im) g_im o_im. Every exponent
is at most 0. Lengths are taken in blocks of layout.BLOCK; only states pass between blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from entp.engine.layout import Packing


def running_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Attention of token i over keys 0..m-1 for every row (prefix of length m, token i): (N, H d).

    q, k, v: (B, H, T, d); k and v may have fewer heads, shared by groups.
    bias: (B or 1, H or 1, T, T), added to the scores.
    """
    kind = v.dtype
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    wide = (at_least_fp32(x) for x in (q, k, v))
    bias = None if bias is None else at_least_fp32(bias)
    return _RunningAttention.apply(*wide, bias, packing, scale).to(kind)


class _RunningAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, packing: Packing, scale: float
    ) -> Tensor:
        scores = (q * scale) @ k.transpose(-1, -2)
        if bias is not None:
            scores += bias
        total = torch.logcumsumexp(scores, dim=-1)  # z of length m at m - 1
        state, pieces = torch.zeros_like(v), []
        for keys, ends, rows in packing.blocks:
            after = total[..., keys.stop - 1, None]
            if len(ends):
                dense = _block_outputs(scores, total, v, state, keys, ends)
                pieces.append(dense.index_select(0, rows))
            added = torch.exp(scores[..., keys] - after) @ v[:, :, keys]
            if keys.start:
                added = torch.exp(total[..., keys.start - 1, None] - after) * state + added
            state = added
        out = torch.cat(pieces)
        ctx.save_for_backward(q, k, v, scores, total, out)
        ctx.packing, ctx.scale = packing, scale
        ctx.bias = None if bias is None else bias.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        q, k, v, scores, total, out = ctx.saved_tensors
        d_scores, d_v = torch.empty_like(scores), torch.empty_like(v)
        later = torch.zeros_like(v)  # sum over later lengths of exp(z here - z there) g
        inner = torch.zeros_like(v[..., :1])  # the same of g o
        grad_out, row = grad * out, len(grad)
        for keys, ends, rows in reversed(ctx.packing.blocks):
            g, go = (t[row - len(rows) : row] for t in (grad, grad_out))
            row -= len(rows)
            weight = torch.exp(scores[..., keys] - total[..., keys.stop - 1, None])
            d_scores[..., keys] = weight * (later @ v[:, :, keys].mT - inner)
            d_v[:, :, keys] = weight.mT @ later
            before = total[..., keys.start - 1, None] if keys.start else None
            if before is not None:
                decay = torch.exp(before - total[..., keys.stop - 1, None])
                later, inner = later * decay, inner * decay
            if len(ends):
                sums = (d_scores, d_v, later, inner)
                _block_gradients(scores, total, v, keys, ends, rows, (g, go), sums, before)
        d_bias = None if ctx.bias is None else d_scores.sum_to_size(ctx.bias)
        return ctx.scale * (d_scores @ k), ctx.scale * (d_scores.mT @ q), d_v, d_bias, None, None


def _block_outputs(
    scores: Tensor, total: Tensor, v: Tensor, state: Tensor, keys: slice, ends: Tensor
) -> Tensor:
    """Outputs after each key in `ends`, all in the block `keys`: a dense block (Packing.blocks)."""
    weight, z = _block_weights(scores, total, keys, ends)
    dense = (weight.flatten(2, 3) @ v[:, :, keys]).unflatten(2, weight.shape[2:4])
    if keys.start:
        decay = torch.exp(total[:, :, : keys.stop, keys.start - 1, None, None] - z)
        dense = dense + decay * state[:, :, : keys.stop, None]
    return dense.permute(3, 0, 2, 1, 4).reshape(-1, v.shape[1] * v.shape[3])


def _block_gradients(
    scores: Tensor,
    total: Tensor,
    v: Tensor,
    keys: slice,
    ends: Tensor,
    rows: Tensor,
    row_gradients: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor, Tensor, Tensor],
    before: Tensor | None,
) -> None:
    """Add one block to the gradients of scores and values, and to what earlier keys get."""
    d_scores, d_v, later, inner = sums
    g, go = (_dense(x, rows, ends, keys.stop, v) for x in row_gradients)  # (B, H, i, lengths, d)
    go = go.sum(-1, keepdim=True)
    weight, z = _block_weights(scores, total, keys, ends)
    pulled = (g.flatten(2, 3) @ v[:, :, keys].mT).unflatten(2, g.shape[2:4])
    d_scores[:, :, : keys.stop, keys] += (weight * (pulled - go)).sum(3)
    d_v[:, :, keys] += weight.flatten(2, 3).mT @ g.flatten(2, 3)
    if before is not None:
        decay = torch.exp(before[:, :, : keys.stop, None] - z)
        later[:, :, : keys.stop] += (decay * g).sum(3)
        inner[:, :, : keys.stop] += (decay * go).sum(3)


def _block_weights(
    scores: Tensor, total: Tensor, keys: slice, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """exp(s_ij - z_im) up to each end, (B, H, i, lengths, keys), and z (B, H, i, lengths, 1)."""
    z = total[:, :, : keys.stop].index_select(-1, ends)[..., None]
    after = torch.arange(keys.start, keys.stop, device=ends.device) > ends[:, None]
    exponents = (scores[:, :, : keys.stop, None, keys] - z).masked_fill(after, float("-inf"))
    return torch.exp(exponents), z


def _dense(packed_rows: Tensor, rows: Tensor, ends: Tensor, tokens: int, v: Tensor) -> Tensor:
    """Packed rows of a block as (B, H, i, lengths, d), 0 where there is no prefix."""
    batch, heads, _, size = v.shape
    dense = packed_rows.new_zeros(len(ends) * batch * tokens, heads * size)
    dense.index_copy_(0, rows, packed_rows)
    return dense.view(len(ends), batch, tokens, heads, size).permute(1, 3, 2, 0, 4)


def at_least_fp32(x: Tensor) -> Tensor:
    """x itself, or widened from half precision."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
