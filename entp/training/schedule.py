"""The learning rate of each step."""

from __future__ import annotations

import math

from entp.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, spent: float = 0.0, first: int = 0) -> float:
    """The learning rate of a step: linear warm-up, then decay to min_lr at decay_steps.

    spent: the fraction of train.max_seconds that is over, for decay_by "seconds".
    first: steps that came before this schedule, the warm-up among them.
    """
    step, warmup = step - first, 0 if first else config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    steps = (step - warmup) / (config.decay_steps - warmup)
    done = min(1.0, spent if config.decay_by == "seconds" else steps)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left
