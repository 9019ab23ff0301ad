"""How the rows of many prefixes are packed: shortest prefixes first, no padding, prefixes of equal length together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def _table(make: Callable[[Packing], Tensor]) -> cached_property[Tensor]:
    """A cached tensor that may serve in a backward pass, even if it is made where none is recorded."""

    def made(packing: Packing) -> Tensor:
        with torch.inference_mode(False):
            return make(packing)

    made.__doc__ = make.__doc__
    return cached_property(made)


@dataclass(frozen=True, eq=False)
class Packing:
    """Which prefixes are computed, and how their rows are laid out. What follows from that is computed once and kept."""

    sequence: Tensor
    """(M,) the sequence of each prefix, in packed order: by length, then by sequence."""
    length: Tensor
    """(M,) its length."""
    groups: tuple[tuple[int, int], ...]
    """(length, how many prefixes) for each length that occurs, ascending."""
    batch: int
    """B, the number of sequences."""
    alone: bool
    """Is at most one prefix asked of each sequence? Then prefixes have nothing to share in layer 1."""

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
        slots = torch.full((self.rows,), -1, dtype=torch.int32, device=self.length.device)
        slots[self.last_row] = torch.arange(len(self.length), dtype=torch.int32, device=slots.device)
        return slots

    @_table
    def bounds(self) -> Tensor:
        """(M + 1,) int32 first rows, as variable-length attention kernels want them."""
        return F.pad(self.length.cumsum(0), (1, 0)).to(torch.int32)

    def tables(self) -> list[Tensor]:
        """All that follows from the layout, made now: a step that is being recorded must find them."""
        return [self.bounds, self.last_slot, self.caller_order, self.row_index, self.row_of, self.row_token]

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
        """(M,) packed indices sequence by sequence, shortest prefix first: the order in which results are returned."""
        return torch.argsort(self.sequence * (self.longest + 1) + self.length)

    @_table
    def row_index(self) -> Tensor:
        """(N,) int32: each row's token among all tokens of B sequences cut to the longest prefix."""
        return (self.sequence[self.row_prefix] * self.longest + self.row_token).int()

    @_table
    def row_of(self) -> Tensor:
        """(B, longest) int32: the first row of the prefix that ends there, -1 where none is asked for."""
        first = torch.full((self.batch, self.longest), -1, dtype=torch.int32, device=self.length.device)
        first[self.sequence, self.length - 1] = self.bounds[:-1]
        return first


@dataclass(eq=False)
class Strided:
    """Prefixes at fixed places, `stride` rows apart, whose lengths may change in place: one per sequence, as generation needs.

    It offers what kernels read of a Packing. Rows past a prefix's end are computed and never seen.
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
        self.ends.copy_(self.starts + self.length)
        number = torch.arange(len(self.length), device=self.length.device, dtype=torch.int32)[:, None]
        last = torch.arange(self.longest, device=self.length.device) == self.length[:, None] - 1
        self.last_slot.copy_(torch.where(last, number, -1))


Layout = Packing | Strided
"""Where prefixes stand, as kernels see it."""


class _Shared:
    """Tables by mask and device: one object for equal masks, as long as anyone holds it, and the last few in any case.

    A recorded step holds its own, so that what it reads is never freed and never made while recording.
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
    return Packing(*tables, groups, len(mask), alone=bool((mask.sum(1) <= 1).all()))


_packings = _Shared(_make_packing, recent=8)
_positions = _Shared(lambda mask, device: torch.from_numpy(mask.ravel().nonzero()[0]).to(device), recent=32)


def pack(wanted: Tensor, device: torch.device | None = None) -> Packing:
    """The packing of the prefixes marked in wanted (B, T), its tensors on `device`, or where wanted is."""
    return _packings(wanted, device)


def whole_sequences(batch: int, time: int, device: torch.device) -> Packing:
    """The packing of each whole sequence: rows as they stand in (B, T)."""
    ends = torch.zeros(batch, time, dtype=torch.bool)
    ends[:, -1] = True
    return pack(ends, device)


def positions_of(mask: Tensor, device: torch.device | None = None) -> Tensor:
    """The flat positions of True in a mask (B, T), on `device`, or where the mask is."""
    return _positions(mask, device)


def trim(wanted: Tensor) -> slice:
    """The sequences from the first to the last of which anything is asked; all if nothing is."""
    asked = wanted.any(1).nonzero()[:, 0].tolist()
    return slice(asked[0], asked[-1] + 1) if asked else slice(None)


def split(wanted: Tensor, token_budget: int) -> Iterator[Tensor]:
    """Disjoint masks that add up to wanted, each of at most token_budget rows (or one prefix, if that alone is longer).

    Whole sequences stay together where they fit, because layer 1 is computed once per sequence and mask, in parts of about
    equal size; a sequence that does not fit is cut between lengths.
    """
    wanted = wanted.cpu()
    rows = rows_of(wanted)
    fitting = [b for b, n in enumerate(rows) if 0 < n <= token_budget]
    total = sum(rows[b] for b in fitting)
    even = total / max(1, -(-total // token_budget))
    part: list[int] = []
    taken = 0
    for b in fitting:
        if part and (taken + rows[b] > token_budget or taken >= even):
            yield _mask_of(wanted, part)
            part, taken = [], 0
        part.append(b)
        taken += rows[b]
    if part:
        yield _mask_of(wanted, part)
    for b in (b for b, n in enumerate(rows) if n > token_budget):
        yield from _split_lengths(wanted, b, token_budget)


def rows_of(wanted: Tensor) -> list[int]:
    """How many rows the wanted prefixes (B, T) of each sequence have together."""
    return (wanted * torch.arange(1, wanted.shape[1] + 1, device=wanted.device)).sum(1).tolist()


def _mask_of(wanted: Tensor, sequences: list[int]) -> Tensor:
    """wanted in these sequences only."""
    mask = torch.zeros_like(wanted)
    mask[sequences] = wanted[sequences]
    return mask


def _split_lengths(wanted: Tensor, sequence: int, token_budget: int) -> Iterator[Tensor]:
    """Masks of one sequence's prefixes, the shortest first."""
    ends = wanted[sequence].nonzero()[:, 0]
    rows = (ends + 1).cumsum(0)
    start = 0
    while start < len(ends):
        before = int(rows[start - 1]) if start else 0
        stop = max(start + 1, int(torch.searchsorted(rows, before + token_budget, right=True)))
        mask = torch.zeros_like(wanted)
        mask[sequence, ends[start:stop]] = True
        yield mask
        start = stop
