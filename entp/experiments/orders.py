"""How much a model's answers change with the order of a prompt's examples.

The function that a prompt shows does not depend on the order of its examples, and neither does
least squares. A model's answer may: the variance of its answers over random orders is measured in
the units of the squared error, so that both can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from entp.tasks.base import IGNORE, Batch
from entp.tasks.in_context import InContext, permuted
from entp.tasks.metrics import Predicted, Totals
from entp.training.forward import Forward

ORDER_STREAM = 2000
"""Of random numbers: no split has this number."""
QUARTERS = (1, 2, 3, 4)
"""Queries after these quarters of the examples are asked."""


@torch.no_grad()
def variance_over_orders(
    model: Any,
    task: InContext,
    batches: Iterable[Batch],
    how: Forward,
    orders: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Totals:
    """The variance of the answers over so many random orders of the examples, as the task's metrics
    have it, after a quarter, half, three quarters and all of the examples."""
    totals = Totals(task.metrics)
    for number, batch in enumerate(batches):
        variances = []
        for examples in asked(task.points):
            streams = [(seed, ORDER_STREAM, number, examples, order) for order in range(orders)]
            mixed = (
                permuted(batch, np.random.default_rng(np.random.SeedSequence(one)), examples)
                for one in streams
            )
            answers = np.stack([_answers(model, how, one, device) for one in mixed])
            variances.append(answers.var(0, ddof=1, dtype=float))
        totals += _measured(task, batch, np.stack(variances, axis=1))
    return totals


def asked(points: int) -> list[int]:
    """Numbers of examples before the queries that are asked."""
    return sorted({max(1, (points - 1) * quarter // 4) for quarter in QUARTERS})


def _answers(model: Any, how: Forward, batch: Batch, device: torch.device | str) -> np.ndarray:
    """The answer to the only query of each sequence."""
    x = torch.from_numpy(batch.x).to(device)
    outputs = how(model, x, torch.from_numpy(batch.target_mask))
    return how.answers(outputs).float().cpu().numpy()


def _measured(task: InContext, batch: Batch, variances: np.ndarray) -> Totals:
    """Variances (sequences, queries that are asked) as the task measures squared errors."""
    at = [2 * examples for examples in asked(task.points)]
    y = np.full_like(batch.y, IGNORE)
    y[:, at] = batch.y[:, at]
    some = Batch(batch.x, y)
    got = Predicted(some.targets, variances.ravel())
    return Totals.of(task.metrics, some, task.measure(some, got))
