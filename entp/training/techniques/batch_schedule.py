"""Another batch size from some step on."""

from __future__ import annotations

from entp.config import Run
from entp.training.techniques.base import Technique


class BatchSchedule(Technique):
    """batch_schedule.batch_size sequences from batch_schedule.step on."""

    def __init__(self, run: Run) -> None:
        assert run.batch_schedule is not None
        self.config = run.batch_schedule
        self.changes = (self.config.step,)

    def batch_size(self, step: int, size: int) -> int:
        return self.config.batch_size if step >= self.config.step else size
