"""How the rows of many prefixes are packed: shortest prefixes first, no padding, prefixes of equal length together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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
