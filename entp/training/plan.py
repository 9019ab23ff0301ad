"""What each step of a run is: its mode, batch size and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from entp.config import Run
from entp.training.schedule import learning_rate
from entp.training.techniques.base import make_techniques


class Plan:
    """Steps of a run, as pure functions of the step (and, for decay by seconds, the clock)."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.techniques = make_techniques(run)

    def mode(self, step: int) -> str:
        mode: str = self.run.mode
        for technique in self.techniques:
            mode = technique.mode(step, mode)
        return mode

    def batch_size(self, step: int) -> int:
        """Sequences in this training step."""
        size = self.run.batch_size
        for technique in self.techniques:
            size = technique.batch_size(step, size)
        return size

    def learning_rate(self, step: int, seconds: float) -> float:
        optim, first = self.run.optim, 0
        for technique in self.techniques:
            optim, first = technique.schedule(step, self.run.optim) or (optim, first)
        return learning_rate(optim, step, seconds / (self.run.train.max_seconds or math.inf), first)

    def segments(self, start: int, end: int) -> Iterator[range]:
        """The steps from start to end, cut where the batch size or the mode may change; none if the
        end is not after the start."""
        changes = {change for technique in self.techniques for change in technique.changes}
        cuts = [start, *sorted(c for c in changes if start < c < end), end]
        for steps in map(range, cuts, cuts[1:]):
            if steps:
                yield steps

    def sequences_by(self, step: int) -> int:
        """Sequences read before this training step."""
        return sum(len(part) * self.batch_size(part[0]) for part in self.segments(0, step))
