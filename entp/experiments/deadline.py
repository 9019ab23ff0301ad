"""Which run begins next, where the time is limited: as many as possible are to end before it is
up, rather than all to be nearly done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from entp.experiments.workers import Ending

CAUTION = 1.15
"""Estimates are rough: a run begins only if this many times its own would do."""
SAVING = 10.0
"""Seconds before the end in which nothing should have to be trained any more."""
RECENT = 8
"""Ended runs by which estimates are corrected."""
AROUND = 15.0
"""Seconds of a run beside its training: start, first steps, test."""


class Deadline:
    """A choice of the next run, told when runs begin and end.

    Runs at work at the same time are taken to slow each other down as if they took turns, which is
    what a busy GPU makes of them; what ended tells how far that is right here.
    """

    def __init__(self, seconds: Sequence[float], end: float | None) -> None:
        """seconds: about how long each run trains alone. end: by time.monotonic(); None: no
        limit."""
        self.seconds, self.end = seconds, end
        self.begun: dict[int, float] = {}
        self.beside: dict[int, int] = {}
        """Most runs that each had beside it."""
        self.took: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """Of ended runs: their time, and what was expected."""

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

    def ended(self, ending: Ending) -> None:
        """A run has ended. One that failed or was stopped says nothing about the others."""
        number = ending.number
        took, beside = time.monotonic() - self.begun.pop(number), self.beside.pop(number)
        if ending.error is None and not ending.stopped_by:
            self.took.append((took, self._expected(number, beside)))

    def _expected(self, number: int, beside: int) -> float:
        return AROUND + self.seconds[number] * (beside + 1)

    def _ends_in_time(self, number: int, busy: int) -> bool:
        if self.end is None:
            return True
        took, expected = map(sum, zip(*self.took, strict=True)) if self.took else (1.0, 1.0)
        needed = CAUTION * took / expected * self._expected(number, busy)
        return needed <= self.end - time.monotonic() - SAVING
