"""Positions other than a learned table: sinusoids, rotations, and a bias on attention scores.

Position ids are whole numbers from 0 on; two tokens may share one. Shapes in names: B batch,
T time, H heads, d head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

BASE = 10_000.0
"""Wavelengths go from 2 pi to 2 pi times this (Vaswani et al. 2017, Su et al. 2021)."""


def angles(position_ids: Tensor, count: int, dtype: torch.dtype, base: float = BASE) -> Tensor:
    """(..., count) angles at frequencies from 1 down to about 1 / base, in fp32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = base ** (-torch.arange(count, device=position_ids.device, dtype=wide) / count)
    return position_ids[..., None].to(wide) * frequencies


def sinusoids(position_ids: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(..., width) sines, then cosines, of every position."""
    found = angles(position_ids, -(-width // 2), dtype)
    return torch.cat([found.sin(), found.cos()], -1)[..., :width].to(dtype)


class Rotary(nn.Module):
    """Rotates queries and keys by their positions: a score then depends on two tokens' distance.

    Feature e turns together with feature e + d / 2, as in Llama. Computed in fp32 or wider,
    whatever the type of x.
    """

    def __init__(self, base: float = BASE) -> None:
        super().__init__()
        self.base = base

    def table(self, position_ids: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines (..., size / 2) of the angles at these positions."""
        found = angles(position_ids, size // 2, dtype, self.base)
        return found.cos(), found.sin()

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """x (..., H, d) turned; position_ids (...), or what broadcasts to it."""
        table = self.table(position_ids, x.shape[-1], x.dtype)
        cos, sin = (values[..., None, :] for values in table)
        one, two = x.to(cos.dtype).chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)


class RelativeBias(nn.Module):
    """A learned number per head and bucket of distances, added to all scores, as in T5 and MPNet.

    Half of the buckets are for keys after the query. Of each half, half are for single distances,
    the others grow logarithmically up to FARTHEST.
    """

    BUCKETS = 32
    FARTHEST = 128

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(self.BUCKETS, heads))

    def forward(self, query_ids: Tensor, key_ids: Tensor) -> Tensor:
        """(..., H, Q, K) from position ids (..., Q) and (..., K)."""
        apart = key_ids[..., None, :] - query_ids[..., :, None]
        return self.weight[self._bucket(apart)].movedim(-1, -3)

    def _bucket(self, apart: Tensor) -> Tensor:
        half = self.BUCKETS // 2
        single = half // 2
        distance = apart.abs()
        growth = torch.log(distance.clamp(min=1) / single) / math.log(self.FARTHEST / single)
        far = (single + growth * (half - single)).long().clamp(max=half - 1)
        return torch.where(distance < single, distance, far) + half * (apart > 0)
