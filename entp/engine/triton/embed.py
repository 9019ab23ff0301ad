"""Token and position vectors, with a backward pass that neither sorts nor uses atomics.

Defined by the model's own `vectors`. torch adds up the gradients of equal tokens by sorting them,
which is a dozen launches: for a small vocabulary, one program per token id that looks for its own
is faster.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from entp.engine.support import plain_embedding
from entp.engine.triton.rows import column_sums

LARGEST = 1024
"""Vocabulary up to which every id has a program of its own."""
PART = 8192
"""Most tokens that a program looks through: the sums of chunks are added up afterwards."""


@triton.jit(do_not_specialize=["N"])
def _token_gradients(ids, grad, out, N, D, PART: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """One token id, C columns, PART of the tokens: the sum of the gradients where it stands."""
    own, cols, part = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C), tl.program_id(2)
    total = tl.zeros((C,), out.dtype.element_ty)
    for start in range(part * PART, tl.minimum(N, (part + 1) * PART), R):
        rows = (start + tl.arange(0, R)).to(tl.int64)
        mine = tl.load(ids + rows, mask=rows < N, other=-1) == own
        at = rows[:, None] * D + cols[None, :]
        total += tl.sum(tl.load(grad + at, mask=mine[:, None] & (cols < D)[None, :], other=0.0), 0)
    at = part.to(tl.int64) * tl.num_programs(0) + own
    tl.store(out + at * D + cols, total, mask=cols < D)


def embed(model: Any, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """As model.vectors(x, position_ids)."""
    kind = model.config.position_embedding
    small = plain_embedding(model) and model.tokens.num_embeddings <= LARGEST
    if small and kind == "learned" and position_ids is None:
        return _Embed.apply(x, model.tokens.weight, model.positions)
    if small and kind in ("none", "rotary"):
        return _Embed.apply(x, model.tokens.weight, None)
    return model.vectors(x, position_ids)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.sizes = (len(tokens), 0 if positions is None else len(positions))
        return tokens[x] if positions is None else tokens[x] + positions[: x.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, Tensor | None]:
        (x,) = ctx.saved_tensors
        grad, width, time = grad.contiguous(), grad.shape[2], x.shape[1]
        vocabulary, longest = ctx.sizes
        chunks = triton.cdiv(x.numel(), PART)
        shares = grad.new_empty(chunks, vocabulary, width)
        grid = (vocabulary, triton.cdiv(width, 32), chunks)
        _token_gradients[grid](
            x.contiguous(), grad, shares, x.numel(), width, PART, 512, 32, num_warps=4
        )
        d_tokens = shares[0] if chunks == 1 else shares.sum(0)
        if not longest:
            return None, d_tokens, None
        d_positions = grad.new_zeros(longest, width)
        d_positions[:time] = column_sums(grad.flatten(1), grad.dtype).view(time, width)
        return None, d_tokens, d_positions
