"""Algorithms for Count3 that count their own steps and counters.

Count3(x_1..x_n) = |{(i, j) in [n]^2 : x_i + x_j + x_n = 0 mod n}| mod n    (paper, eq. Count3)

    algorithm                      steps           counters    kept for all lengths
    quadratic   alg:tc1            n^2             0
    linear      alg:tc2            2n              n
    blocked     s residues a time  2n ceil(n/s)    s
    in_place    overwrites x       O(n log n)      0           the input, which it sorts
    RunningTable                   n + 1           0           n counters, one changed per token
    AppendOnlyTable                O(n log n)      O(log n)    the same, nothing ever overwritten
    CellPerToken                   5n + O(log n)   1           one cell a token, never overwritten

The first three only read x. `blocked` with s = sqrt n takes neither n^2 steps nor n counters, so it
is outside both branches of Conjecture con:ts2; its steps times its counters are still about 2n^2.
The last four show what that product rests on: x may not be overwritten, and nothing may be kept
from shorter lengths. (The three tables' lines hold for values below n.)

A step is one turn of an inner loop: it reads one x_i, does O(1) arithmetic modulo n, and touches at
most one counter. A pass over x is written as a few numpy operations and counts n steps, one for
each x_i; numpy's temporaries stand for the scalars that the loop would reuse. The versions called
`plain_` run one step at a time and must count the same. Reduction modulo n is done again in every
pass, because a reduced copy of x would be n values. Zeroing a table is not counted: at most n + s
steps in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from entp.errors import InputError


@dataclass(frozen=True)
class Counted:
    """An answer and what it took."""

    value: int
    """Count3 of the sequence."""
    time: int
    """Steps done once x_n is known."""
    space: int
    """Most counters alive at once that were made for this length, besides a few scalars."""
    shared: int = 0
    """Cells kept from shorter lengths, none of them a function of n."""


@dataclass
class Meter:
    """Adds up steps, and keeps the most counters that were alive at once."""

    time: int = 0
    live: int = 0
    peak: int = 0

    def step(self, count: int = 1) -> None:
        """`count` more steps were done."""
        self.time += count

    def allocate(self, count: int = 1) -> None:
        """`count` more counters are alive."""
        self.live += count
        self.peak = max(self.peak, self.live)

    def free(self, count: int = 1) -> None:
        """`count` counters are no longer needed."""
        self.live -= count

    @contextmanager
    def table(self, size: int) -> Iterator[np.ndarray]:
        """`size` counters, all zero, alive inside the with-block."""
        self.allocate(size)
        yield np.zeros(size, dtype=np.int64)
        self.free(size)

    def counted(self, count: int, n: int, shared: int = 0) -> Counted:
        """The result for `count` pairs."""
        return Counted(int(count) % n, self.time, self.peak, shared)


def quadratic(x: Sequence[int] | np.ndarray) -> Counted:
    """Try all pairs (alg:tc1): n^2 steps, no counters."""
    x, n, last = _read(x)
    meter, count = Meter(), 0
    for x_i in x:
        count += int(np.count_nonzero((x % n + (x_i % n + last)) % n == 0))
        meter.step(len(x))
    return meter.counted(count, n)


def linear(x: Sequence[int] | np.ndarray) -> Counted:
    """Count every residue, then look each partner up (alg:tc2): 2n steps, n counters."""
    x, n, last = _read(x)
    meter = Meter()
    with meter.table(n) as table:
        np.add.at(table, -x % n, 1)
        meter.step(len(x))
        count = table[(x % n + last) % n].sum()
        meter.step(len(x))
    return meter.counted(count, n)


def blocked(x: Sequence[int] | np.ndarray, s: int) -> Counted:
    """The linear algorithm on s residues at a time: 2n ceil(n/s) steps, s counters.

    For each of the ceil(n/s) blocks of residues, one pass counts the -x_j mod n inside the block
    and a second adds the counters that are hit by an x_i + x_n mod n. blocked(x, n) is linear(x).
    """
    x, n, last = _read(x)
    meter, count = Meter(), 0
    for low, width in _blocks(n, s):
        with meter.table(width) as table:
            at = -x % n - low
            np.add.at(table, at[(at >= 0) & (at < width)], 1)
            meter.step(len(x))
            at = (x % n + last) % n - low
            count += table[at[(at >= 0) & (at < width)]].sum()
            meter.step(len(x))
    return meter.counted(count, n)


def plain_quadratic(x: Sequence[int] | np.ndarray) -> Counted:
    """alg:tc1 line by line."""
    x, n, last = _read(x)
    meter, count = Meter(), 0
    for x_i in x.tolist():
        for x_j in x.tolist():
            meter.step()
            if (x_i + x_j + last) % n == 0:
                count += 1
    return meter.counted(count, n)


def plain_linear(x: Sequence[int] | np.ndarray) -> Counted:
    """alg:tc2 line by line."""
    x, n, last = _read(x)
    meter, count = Meter(), 0
    with meter.table(n) as table:
        for x_i in x.tolist():
            meter.step()
            table[-x_i % n] += 1
        for x_i in x.tolist():
            meter.step()
            count += table[(x_i + last) % n]
    return meter.counted(count, n)


def plain_blocked(x: Sequence[int] | np.ndarray, s: int) -> Counted:
    """`blocked`, one step at a time."""
    x, n, last = _read(x)
    meter, count = Meter(), 0
    for low, width in _blocks(n, s):
        with meter.table(width) as table:
            for x_j in x.tolist():
                meter.step()
                if low <= -x_j % n < low + width:
                    table[-x_j % n - low] += 1
            for x_i in x.tolist():
                meter.step()
                if low <= (x_i + last) % n < low + width:
                    count += table[(x_i + last) % n - low]
    return meter.counted(count, n)


def in_place(x: Sequence[int] | np.ndarray) -> Counted:
    """Reduce and sort x in place, then walk it from both ends: O(n log n) steps, no counters.

    The caller's x is copied first and stays as it is; the copy stands for an input that may be
    written to.
    """
    x, n, last = _read(x)
    meter, cells = Meter(), x.tolist()
    for i in range(n):
        meter.step()
        cells[i] %= n
    _heap_sort(cells, meter)
    target = -last % n
    return meter.counted(_pairs(cells, target, meter) + _pairs(cells, target + n, meter), n)


def _heap_sort(cells: list[int], meter: Meter) -> None:
    """Sort in place; one step for each exchange or final comparison on the way down."""

    def sink(at: int, end: int) -> None:
        while True:
            meter.step()
            child = 2 * at + 1
            if child + 1 < end and cells[child] < cells[child + 1]:
                child += 1
            if child >= end or cells[child] <= cells[at]:
                return
            cells[at], cells[child] = cells[child], cells[at]
            at = child

    for start in reversed(range(len(cells) // 2)):
        sink(start, len(cells))
    for end in reversed(range(1, len(cells))):
        cells[0], cells[end] = cells[end], cells[0]
        sink(0, end)


def _pairs(cells: list[int], total: int, meter: Meter) -> int:
    """Ordered pairs of a sorted list that sum to `total`; one step for each cell that is passed."""
    low, high, pairs = 0, len(cells) - 1, 0
    while low < len(cells) and high >= 0:
        small, large = cells[low], cells[high]
        equal_small = equal_large = 0
        while small + large <= total and low < len(cells) and cells[low] == small:
            meter.step()
            low, equal_small = low + 1, equal_small + 1
        while small + large >= total and high >= 0 and cells[high] == large:
            meter.step()
            high, equal_large = high - 1, equal_large + 1
        pairs += equal_small * equal_large
    return pairs


class RunningTable:
    """Count3 after every token, from one table of all lengths: how often each raw value has come.

    No cell is a function of n, and one cell changes per token. An answer looks up, for each x_i,
    every raw value that is -(x_i + x_n) modulo n: at most n ceil(values/n) steps after the one that
    adds x_n, and no counter made for this length.
    """

    def __init__(self, values: int) -> None:
        if values < 1:
            raise InputError(f"values is {values}: a table needs at least 1.")
        self.values = values
        self.x: list[int] = []
        self.arrival = Meter()
        """What adding the last token took."""
        self._make()

    def append(self, value: int) -> None:
        """The next token of the sequence."""
        if not 0 <= value < self.values or value != int(value):
            allowed = f"allowed are 0 to {self.values - 1}, whole numbers"
            raise InputError(f"{value} does not fit a table of {self.values} values: {allowed}.")
        self.x.append(int(value))
        self.arrival = Meter()
        self._add(int(value))

    def extend(self, x: Sequence[int] | np.ndarray) -> None:
        """Several tokens, one after the other."""
        for value in np.asarray(x).tolist():
            self.append(value)

    def count3(self) -> Counted:
        """Count3 of the tokens so far; its steps include those that added the last one."""
        x, n, last = _read(self.x)
        meter, count = replace(self.arrival), 0
        for start in range(0, self.values, n):
            raw = -(x % n + last) % n + start
            meter.step(len(x))
            count += self._look_up(raw[raw < self.values], meter).sum()
        return meter.counted(count, n, shared=self._cells() - meter.live)

    def _make(self) -> None:
        self.table = np.zeros(self.values, dtype=np.int64)

    def _add(self, value: int) -> None:
        self.arrival.step()
        self.table[value] += 1

    def _look_up(self, raw: np.ndarray, meter: Meter) -> np.ndarray:
        """How often each of these raw values has come; a first touch was counted with its x_i."""
        return self.table[raw]

    def _cells(self) -> int:
        return len(self.table)


class AppendOnlyTable(RunningTable):
    """The running table in memory that is never overwritten, like a decoder's keys and values.

    The table is a binary tree over the raw values, with the counts in its leaves. A token adds a
    new copy of the path from the root to its leaf, ceil(log2(values)) + 1 nodes, and shares
    everything else with the tree before it. A look-up walks down from the newest root, a step for
    each node. Space is counted in nodes: two pointers and a count each.
    """

    def _make(self) -> None:
        self.depth = (self.values - 1).bit_length()
        # Node 0 is the empty tree: its children are itself.
        self.left, self.right, self.count = [0], [0], [0]
        self.root = 0

    def _add(self, value: int) -> None:
        self.root = self._copy(self.root, value, self.depth)

    def _copy(self, node: int, value: int, level: int) -> int:
        """A new node like `node`, `level` above the leaves, with one more `value` below it."""
        self.arrival.step()
        self.arrival.allocate()
        left, right, count = self.left[node], self.right[node], self.count[node]
        if level == 0:
            count += 1
        elif value >> (level - 1) & 1:
            right = self._copy(right, value, level - 1)
        else:
            left = self._copy(left, value, level - 1)
        self.left.append(left)
        self.right.append(right)
        self.count.append(count)
        return len(self.count) - 1

    def _look_up(self, raw: np.ndarray, meter: Meter) -> np.ndarray:
        left, right = np.asarray(self.left), np.asarray(self.right)
        node = np.full(len(raw), self.root)
        for level in reversed(range(self.depth)):
            node = np.where(raw >> level & 1, right[node], left[node])
            meter.step(len(raw))
        return np.asarray(self.count)[node]

    def _cells(self) -> int:
        return len(self.count) - 1


class CellPerToken(RunningTable):
    """The running table as one cell a token, never overwritten: the k-th v is the cell (v, k).

    A cell holds only its address, and is found by it, as a decoder's key is. How often v has come
    is found by doubling and bisection in k, a step for each probe: max(1, 2 bit_length(h)) probes
    for a count of h, which is at most 1 + 3h/2. An answer finds every count twice, as h(v) and as
    h(c - v), in at most 2 values + 3n steps. Adding x_n takes O(log n) probes and one cell.
    """

    def count3(self) -> Counted:
        """Count3 of the tokens so far; its steps include those that added the last one."""
        _, n, last = _read(self.x)
        meter, count = replace(self.arrival), 0
        for residue in range(min(n, self.values)):
            here = self._of_residue(residue, n, meter)
            count += here * self._of_residue(-(residue + last) % n, n, meter)
        return meter.counted(count, n, shared=self._cells() - meter.live)

    def _of_residue(self, residue: int, n: int, meter: Meter) -> int:
        """How many tokens are this modulo n."""
        return sum(self._times(value, meter) for value in range(residue, self.values, n))

    def _times(self, value: int, meter: Meter) -> int:
        """How often a raw value has come: the last k whose cell is there."""
        there, above = 0, 1
        while self._is_there(value, above, meter):
            there, above = above, 2 * above
        while above - there > 1:
            middle = (there + above) // 2
            if self._is_there(value, middle, meter):
                there = middle
            else:
                above = middle
        return there

    def _is_there(self, value: int, k: int, meter: Meter) -> bool:
        meter.step()
        return (value, k) in self.written

    def _make(self) -> None:
        self.written: set[tuple[int, int]] = set()

    def _add(self, value: int) -> None:
        cell = (value, self._times(value, self.arrival) + 1)
        self.arrival.step()
        self.arrival.allocate()
        self.written.add(cell)

    def _cells(self) -> int:
        return len(self.written)


def _read(x: Sequence[int] | np.ndarray) -> tuple[np.ndarray, int, int]:
    """The sequence as an array, its length n, and x_n mod n."""
    x = np.asarray(x)
    if x.ndim != 1 or len(x) == 0 or not np.can_cast(x.dtype, np.int64):
        raise InputError(
            f"Count3 got an array of shape {x.shape} and type {x.dtype}: give one sequence of at "
            "least 1 whole number."
        )
    return x.astype(np.int64), len(x), int(x[-1]) % len(x)


def _blocks(n: int, s: int) -> Iterator[tuple[int, int]]:
    """The first residue and the width of each block of at most s of the n residues."""
    if not 1 <= s <= n:
        raise InputError(f"s is {s}: for a sequence of {n} a block has 1 to {n} residues.")
    for low in range(0, n, s):
        yield low, min(s, n - low)
