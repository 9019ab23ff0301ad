"""The mean loss since it was last asked for, and losses that are not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from entp.errors import TrainingStopped


class LossMeter:
    """The mean loss since it was last asked for, and the first step whose loss was not finite; no
    wait for the device.

    A step costs one copy on the device: losses are kept there until someone asks.
    """

    def __init__(self, seed: int, log_every: int, device: torch.device) -> None:
        self.seed = seed
        self.losses = torch.zeros(min(log_every, 1000), device=device)
        self.kept = self.first = 0
        self.total, self.steps = 0.0, 0

    def update(self, loss: Tensor, step: int) -> None:
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
                f"the loss is not finite at step {step + 1} (batch: seed {self.seed}, split "
                f"train, step {step}); "
                "nothing was overwritten. Lower optim.lr, or look at that batch."
            )
        self.total, self.steps, self.kept = self.total + sum(values), self.steps + len(values), 0

    def mean(self) -> float:
        """The mean loss since the last call, after a check."""
        self.check()
        mean = self.total / max(1, self.steps)
        self.total, self.steps = 0.0, 0
        return mean


def check_finite(values: dict[str, float], step: int) -> None:
    """Raise TrainingStopped for a value that says that the weights have gone bad, though no loss of
    a step has said so yet."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise TrainingStopped(
                f"{name} is {value} after step {step}; nothing was overwritten. Lower optim.lr."
            )
