"""How much a model's answers change where a task's examples come in another order.

The function that a prompt shows does not depend on the order of its examples, and neither does
least squares. A model's answer may: the variance of its answers over random orders is measured in
the units of the squared error, so that both can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from entp.tasks.base import IGNORE, Batch, Task
from entp.tasks.metrics import Predicted, Totals
from entp.training.forward import Forward

ORDER_STREAM = 2000
"""Of random numbers: no split has this number."""


@torch.no_grad()
def variance_over_orders(
    model: Any,
    task: Task,
    batches: Iterable[Batch],
    how: Forward,
    orders: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Totals:
    """The variance of the answers over so many random orders of the examples, as the task's metrics
    have it, at the queries that the task asks in another order."""
    totals = Totals(task.metrics)
    for number, batch in enumerate(batches):
        y = np.full_like(batch.y, IGNORE)
        answers = np.zeros((orders, *y.shape))
        for order in range(orders):
            rng = np.random.default_rng((seed, ORDER_STREAM, number, order))
            for mixed in task.reordered(batch, rng):
                y[mixed.row, mixed.position] = mixed.targets
                answers[order, mixed.row, mixed.position] = _answers(model, how, mixed, device)
        some = Batch(batch.x, y)
        variances = answers.var(0, ddof=1)[some.target_mask]
        totals += Totals.of(
            task.metrics, some, task.measure(some, Predicted(some.targets, variances))
        )
    return totals


def _answers(model: Any, how: Forward, batch: Batch, device: torch.device | str) -> np.ndarray:
    x = torch.from_numpy(batch.x).to(device)
    outputs = how(model, x, torch.from_numpy(batch.target_mask))
    return how.answers(outputs).float().cpu().numpy()
