"""Which evaluation is the best, and when a run needs no more steps: the trainer and whoever reads a
run folder decide it by the same functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from entp.config import Run
from entp.tasks.base import Task
from entp.tasks.metrics import Metric


def monitored(run: Run) -> Metric:
    """The metric that decides which checkpoint is best and when to stop."""
    return next(metric for metric in run.task.metrics if metric.name == run.monitor)


def is_better(
    task: Task, monitor: Metric, values: dict[str, float], best: dict[str, float]
) -> bool:
    """Whether an evaluation beats the best; ties of the monitored metric go to the task's last."""
    if monitor.name not in best:
        return True
    for metric in (monitor, task.metrics[-1]):
        new, old = (found.get(metric.name) for found in (values, best))
        if new is not None and old is not None and new != old:
            return metric.is_better(new, old)
    return False


def stop_reason(run: Run, evaluations: Iterable[Mapping[str, Any]], *, had: bool = False) -> str:
    """Why a run needs no more steps after these evaluations, in their order: its goal is reached,
    or its patience is over. Empty if it goes on.

    had: say it of a run that had ended before.
    """
    train, metric = run.train, monitored(run)
    past = "had " if had else ""
    best: float | None = None
    waited, counting = 0, train.patience_from is None
    for values in evaluations:
        value = values.get(metric.name)
        if value is None:
            continue
        if train.stop_at is not None and metric.reached(value, train.stop_at):
            return f"{metric.name} {past}reached {train.stop_at:g}"
        if train.patience_from is not None:
            counting = counting or metric.reached(value, train.patience_from)
        if best is None or metric.is_better(value, best):
            best, waited = value, 0
        elif counting:
            waited += 1
        if train.patience is not None and waited >= train.patience:
            many = "1 evaluation" if waited == 1 else f"{waited} evaluations in a row"
            return f"{many} {past}brought no better {metric.name}"
    return ""
