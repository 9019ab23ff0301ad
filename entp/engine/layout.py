"""How the rows of many prefixes are packed: shortest prefixes first, without padding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16
"""Lengths that layer 1's online softmax handles together."""
T = TypeVar("T")


def _table(make: Callable[[Packing], T]) -> cached_property[T]:
    """Cached tensors that a backward pass may use, even if they are made in inference mode."""

    def made(packing: Packing) -> T:
        with torch.inference_mode(False):
            return make(packing)

    made.__doc__ = make.__doc__
    return cached_property(made)


@dataclass(frozen=True, eq=False)
class Packing:
    """The prefixes that are computed, and how their rows are laid out; tables are made once."""

    sequence: Tensor
    """(M,) the sequence of each prefix, in packed order: by length, then by sequence."""
    length: Tensor
    """(M,) its length."""
    groups: tuple[tuple[int, int], ...]
    """(length, how many prefixes) for each length that occurs, ascending."""
    batch: int
    """B, the number of sequences."""
    one_per_sequence: bool
    """Whether each sequence has at most one prefix, so that layer 1 has nothing to share."""

    @property
    def longest(self) -> int:
        """Length of the longest prefix."""
        return self.groups[-1][0]

    @cached_property
    def rows(self) -> int:
        """N, the number of rows."""
        return sum(m * count for m, count in self.groups)

    @cached_property
    def row_counts(self) -> list[int]:
        """Rows of each group."""
        return [m * count for m, count in self.groups]

    @_table
    def row_prefix(self) -> Tensor:
        """(N,) the packed index of each row's prefix."""
        return torch.repeat_interleave(self.length, output_size=self.rows)

    @_table
    def row_token(self) -> Tensor:
        """(N,) each row's position inside its prefix."""
        first = self.length.cumsum(0) - self.length
        return torch.arange(self.rows, device=self.length.device) - first[self.row_prefix]

    @_table
    def last_row(self) -> Tensor:
        """(M,) the row at the end of each prefix: where its prediction is read."""
        return self.length.cumsum(0) - 1

    @_table
    def last_slot(self) -> Tensor:
        """(N,) int32: the packed index of a row's prefix if the row is its last, else -1."""
        count, device = len(self.length), self.length.device
        slots = torch.full((self.rows,), -1, dtype=torch.int32, device=device)
        slots[self.last_row] = torch.arange(count, dtype=torch.int32, device=device)
        return slots

    @_table
    def bounds(self) -> Tensor:
        """(M + 1,) int32 first rows, as variable-length attention kernels want them."""
        return F.pad(self.length.cumsum(0), (1, 0)).to(torch.int32)

    @_table
    def blocks(self) -> list[tuple[slice, Tensor, Tensor]]:
        """For each block of lengths in layer 1's online softmax: its keys, the last keys of its
        lengths, and their rows in a dense block.

        A dense block is (lengths of the packing in it, B, tokens up to the block's end, H d): token
        i of sequence b stands in row (length * B + b) * tokens + i.
        """
        time, device = self.longest, self.length.device
        sequences = self.sequence.split([count for _, count in self.groups])
        groups = {m: found for (m, _), found in zip(self.groups, sequences, strict=True)}
        blocks = []
        for start in range(0, time, BLOCK):
            stop = min(start + BLOCK, time)
            lengths = [m for m in range(start + 1, stop + 1) if m in groups]
            rows = []
            for at, m in enumerate(lengths):
                first = (at * self.batch + groups[m])[:, None] * stop
                rows.append((first + torch.arange(m, device=device)).flatten())
            ends = torch.tensor(lengths, dtype=torch.long, device=device) - 1
            blocks.append((slice(start, stop), ends, torch.cat(rows) if rows else ends))
        return blocks

    def tables(self) -> list[Tensor]:
        """All tables, made now: a step that is being captured must find them."""
        return [
            self.bounds,
            self.last_row,
            self.last_slot,
            self.caller_order,
            self.row_index,
            self.row_of,
            self.row_token,
            *(table for _, *tables in self.blocks for table in tables),
        ]

    @property
    def starts(self) -> Tensor:
        """(M,) int32 the first row of each prefix."""
        return self.bounds[:-1]

    @property
    def ends(self) -> Tensor:
        """(M,) int32 one past its last row."""
        return self.bounds[1:]

    @_table
    def caller_order(self) -> Tensor:
        """(M,) packed indices in the order of results: by sequence, shortest prefix first."""
        return torch.argsort(self.sequence * (self.longest + 1) + self.length)

    @_table
    def row_index(self) -> Tensor:
        """(N,) int32: each row's token among all of the B sequences, cut to the longest prefix."""
        return (self.sequence[self.row_prefix] * self.longest + self.row_token).int()

    @_table
    def row_of(self) -> Tensor:
        """(B, longest) int32: the first row of the prefix that ends there, -1 where none does."""
        shape, device = (self.batch, self.longest), self.length.device
        first = torch.full(shape, -1, dtype=torch.int32, device=device)
        first[self.sequence, self.length - 1] = self.bounds[:-1]
        return first


@dataclass(eq=False)
class Strided:
    """One prefix per sequence, `longest` rows apart, whose lengths may change in place.

    Generation needs it. It offers what kernels read of a Packing. Rows past a prefix's end are
    computed and never seen.
    """

    length: Tensor
    """(B,) int64."""
    longest: int
    """The stride."""

    def __post_init__(self) -> None:
        count, device = len(self.length), self.length.device
        self.groups = ((self.longest, count),)
        self.starts = torch.arange(count, device=device, dtype=torch.int32) * self.longest
        self.ends = torch.empty_like(self.starts)
        self.last_slot = torch.empty(count, self.longest, dtype=torch.int32, device=device)
        self.moved()

    def moved(self) -> None:
        """Follow `length` after it changed."""
        count, device = len(self.length), self.length.device
        self.ends.copy_(self.starts + self.length)
        number = torch.arange(count, device=device, dtype=torch.int32)[:, None]
        last = torch.arange(self.longest, device=device) == self.length[:, None] - 1
        self.last_slot.copy_(torch.where(last, number, -1))


Layout = Packing | Strided
"""Where prefixes stand, for kernels."""


class Shared:
    """Tables by mask and device: one object for equal masks, while anyone holds it.

    The last few are held in any case. A captured step holds its own, so that what it reads is never
    freed, and never made while it is captured.
    """

    def __init__(self, make: Callable[[np.ndarray, torch.device], Any], recent: int) -> None:
        self.make = make
        self.alive: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()
        self.recent: deque[Any] = deque(maxlen=recent)

    def __call__(self, mask: Tensor, device: torch.device | None) -> Any:
        bits, device = mask.cpu().numpy(), torch.device(device or mask.device)
        key = (bits.shape, np.packbits(bits).tobytes(), device)
        found = self.alive.get(key)
        if found is None:
            with torch.inference_mode(False):  # whoever comes next may want gradients
                found = self.alive[key] = self.make(bits, device)
            self.recent.append(found)
        return found


def _make_packing(mask: np.ndarray, device: torch.device) -> Packing:
    length, sequence = mask.T.nonzero()
    groups = tuple((t + 1, n) for t, n in enumerate(mask.sum(0, dtype=np.int64).tolist()) if n)
    tables = (torch.from_numpy(sequence).to(device), torch.from_numpy(length + 1).to(device))
    one_per_sequence = bool((mask.sum(1) <= 1).all())
    return Packing(*tables, groups, len(mask), one_per_sequence)


def _make_positions(mask: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(mask.ravel().nonzero()[0]).to(device)


_packings = Shared(_make_packing, recent=8)
_positions = Shared(_make_positions, recent=32)


def pack(target_mask: Tensor, device: torch.device | None = None) -> Packing:
    """The packing of the prefixes in target_mask (B, T), on `device` or where the mask is."""
    return _packings(target_mask, device)


def whole_sequences(batch: int, time: int, device: torch.device) -> Packing:
    """The packing of each whole sequence: rows as they stand in (B, T)."""
    ends = torch.zeros(batch, time, dtype=torch.bool)
    ends[:, -1] = True
    return pack(ends, device)


def positions_of(mask: Tensor, device: torch.device | None = None) -> Tensor:
    """The flat positions of True in a mask (B, T), on `device`, or where the mask is."""
    return _positions(mask, device)


def trim(target_mask: Tensor) -> slice:
    """The sequences from the first to the last with a target; all if none has one."""
    used = target_mask.any(1).nonzero()[:, 0].tolist()
    if not used:
        return slice(None)
    return slice(used[0], used[-1] + 1)


def split(target_mask: Tensor, token_budget: int) -> Iterator[Tensor]:
    """Disjoint masks that add up to target_mask, each of at most token_budget rows.

    A prefix that alone is longer is a chunk of its own. Sequences stay whole where they fit,
    because layer 1 is computed once per sequence and mask, in chunks of about equal size; a
    sequence that does not fit is cut between lengths.
    """
    target_mask = target_mask.cpu()
    rows = rows_of(target_mask)
    fitting = [b for b, n in enumerate(rows) if 0 < n <= token_budget]
    total = sum(rows[b] for b in fitting)
    even = total / max(1, -(-total // token_budget))
    chunk: list[int] = []
    size = 0
    for b in fitting:
        full = size + rows[b] > token_budget or size >= even
        if chunk and full:
            yield _mask_of(target_mask, chunk)
            chunk, size = [], 0
        chunk.append(b)
        size += rows[b]
    if chunk:
        yield _mask_of(target_mask, chunk)
    for b, n in enumerate(rows):
        if n > token_budget:
            yield from _split_lengths(target_mask, b, token_budget)


def rows_of(target_mask: Tensor) -> list[int]:
    """Rows of each sequence's prefixes in target_mask (B, T)."""
    lengths = torch.arange(1, target_mask.shape[1] + 1, device=target_mask.device)
    return (target_mask * lengths).sum(1).tolist()


def _mask_of(target_mask: Tensor, sequences: list[int]) -> Tensor:
    """target_mask in these sequences only."""
    mask = torch.zeros_like(target_mask)
    mask[sequences] = target_mask[sequences]
    return mask


def _split_lengths(target_mask: Tensor, sequence: int, token_budget: int) -> Iterator[Tensor]:
    """Masks of one sequence's prefixes, the shortest first."""
    ends = target_mask[sequence].nonzero()[:, 0]
    rows = (ends + 1).cumsum(0)
    start = 0
    while start < len(ends):
        before = int(rows[start - 1]) if start else 0
        stop = max(start + 1, int(torch.searchsorted(rows, before + token_budget, right=True)))
        mask = torch.zeros_like(target_mask)
        mask[sequence, ends[start:stop]] = True
        yield mask
        start = stop
