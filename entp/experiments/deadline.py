"""Which run begins next, where the time is limited: as many as possible are to end before it is
up, rather than all to be nearly done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

CAUTION = 1.15
"""Estimates are rough: a run begins only if this many times its own would do."""
SAVING = 10.0
"""Seconds before the end in which nothing should have to be trained any more."""
RECENT = 8
"""Ended runs by which estimates are corrected."""


class Deadline:
    """A choice of the next run, told when runs begin and end.

    Runs at work at the same time are taken to slow each other down as if they took turns, which is
    what a busy GPU makes of them; what ended tells how far that is right here.
    """

    def __init__(self, seconds: Sequence[float], end: float | None) -> None:
        """seconds: about how long each run takes alone. end: by time.monotonic(); None: no
        limit."""
        self.seconds, self.end = seconds, end
        self.begun: dict[int, float] = {}
        self.beside: dict[int, int] = {}
        """Most runs that each had beside it."""
        self.ratios: deque[float] = deque(maxlen=RECENT)
        """Of ended runs: their time, as a multiple of what was expected."""

    def __call__(self, waiting: Sequence[int], busy: int) -> int:
        """The next of the waiting runs, beside so many at work: the first that will end in time,
        or where none will the first, for what it gets done; -1 if it had better wait for those at
        work."""
        idle = -1 if busy else waiting[0]
        chosen = next((n for n in waiting if self._ends_in_time(n, busy)), idle)
        if chosen >= 0:
            self.begun[chosen], self.beside[chosen] = time.monotonic(), busy
            for other in self.begun:  # what began first has as many beside it from now on
                self.beside[other] = max(self.beside[other], busy)
        return chosen

    def ended(self, number: int) -> None:
        """A run has ended."""
        took = time.monotonic() - self.begun.pop(number)
        beside = self.beside.pop(number)
        self.ratios.append(took / max(1e-3, self.seconds[number] * (beside + 1)))

    def _ends_in_time(self, number: int, busy: int) -> bool:
        if self.end is None:
            return True
        ratio = sum(self.ratios) / len(self.ratios) if self.ratios else 1.0
        needed = CAUTION * ratio * self.seconds[number] * (busy + 1)
        return needed <= self.end - time.monotonic() - SAVING
