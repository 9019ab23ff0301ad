"""What is watched while steps run: losses that are not finite, and signals that ask for a stop."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from entp.config import Run
from entp.errors import TrainingStopped


class LossWatch:
    """The mean loss since it was last asked for, and the first step whose loss was not finite; no wait for the device."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run = run
        self.total = torch.zeros((), device=device)
        self.steps = 0
        self.first_bad = torch.full((), -1, device=device)

    def note(self, loss: Tensor, step: int) -> None:
        self.first_bad = torch.where((self.first_bad < 0) & ~torch.isfinite(loss), step, self.first_bad)
        self.total += loss
        self.steps += 1

    def check(self) -> None:
        """Raise TrainingStopped if a loss was not finite."""
        step = int(self.first_bad)
        if step >= 0:
            raise TrainingStopped(
                f"the loss is not finite at step {step + 1} (batch: seed {self.run.seed}, split train, step {step}); "
                "nothing was overwritten. Lower optim.max_lr, or look at that batch."
            )

    def mean(self) -> float:
        mean = float(self.total) / max(1, self.steps)
        self.total.zero_()
        self.steps = 0
        return mean


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a wish to stop after the step; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.caught is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = number
        os.write(2, b"\nstopping after this step; interrupt again to stop at once\n")

    def name(self) -> str:
        return signal.Signals(self.caught).name if self.caught else "another process"
