"""What is watched while steps run: losses that are not finite, and signals that ask for a stop."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from entp.config import Run
from entp.errors import TrainingStopped


class LossWatch:
    """The mean loss since it was last asked for, and the first step whose loss was not finite; no wait for the device.

    A step costs one copy on the device: losses are kept there until someone asks.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run = run
        self.losses = torch.zeros(min(run.train.log_every, 1000), device=device)
        self.kept = self.first = 0
        self.total, self.steps = 0.0, 0

    def note(self, loss: Tensor, step: int) -> None:
        """The loss of a step."""
        if self.kept == len(self.losses):
            self.check()
        if self.kept == 0:
            self.first = step
        self.losses[self.kept].copy_(loss)
        self.kept += 1

    def check(self) -> None:
        """Raise TrainingStopped if a loss was not finite."""
        values = self.losses[: self.kept].tolist()
        bad = next((n for n, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is not None:
            step = self.first + bad
            raise TrainingStopped(
                f"the loss is not finite at step {step + 1} (batch: seed {self.run.seed}, split train, step {step}); "
                "nothing was overwritten. Lower optim.max_lr, or look at that batch."
            )
        self.total, self.steps, self.kept = self.total + sum(values), self.steps + len(values), 0

    def mean(self) -> float:
        """The mean loss since the last call, after a check."""
        self.check()
        mean = self.total / max(1, self.steps)
        self.total, self.steps = 0.0, 0
        return mean


def check_finite(values: dict[str, float], step: int) -> None:
    """Raise TrainingStopped for a value that says that the weights have gone bad, though no loss of a step has said so yet."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise TrainingStopped(f"{name} is {value} after step {step}; nothing was overwritten. Lower optim.max_lr.")


ONE_SIGNAL = 0.5
"""Seconds within which signals are one: `timeout`, say, sends its own to a process and then to the group that it is in."""


def _tell() -> None:
    os.write(2, b"\nstopping after this step; interrupt again to stop at once\n")


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a wish to stop; a later SIGINT interrupts at once. Each is told to others."""

    def __init__(self, tell: Callable[[], None] = _tell, tell_again: Callable[[], None] = lambda: None) -> None:
        self.caught: int | None = None
        self.tell, self.tell_again, self.since = tell, tell_again, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.caught is None:
            self.caught, self.since = number, time.monotonic()
            self.tell()
        elif number == signal.SIGINT and time.monotonic() - self.since > ONE_SIGNAL:
            self.tell_again()
            raise KeyboardInterrupt

    def name(self) -> str:
        return signal.Signals(self.caught).name if self.caught else "another process"
