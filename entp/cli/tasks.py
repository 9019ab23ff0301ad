"""`entp tasks`: the tasks, and what one of them draws, takes and measures."""

from __future__ import annotations

from dataclasses import fields

from entp.cli.parse import named_task, parse
from entp.tasks.base import TASKS, Task, task_class
from entp.tasks.metrics import Metric


def tasks_command(args: list[str]) -> int:
    """tasks [TASK]: list the tasks, or draw an example of one"""
    if args and not args[0].startswith("-"):
        task = parse(named_task(args[0]), args[1:], f"entp tasks {args[0]}")
        print(describe(args[0], task.with_data(None)))
        return 0
    for name in TASKS:
        print(f"{name:10} {task_class(name).about}")
    return 0


def describe(name: str, task: Task) -> str:
    """An example, the options, the metrics with their slices, and the baselines of a task."""
    command, prefix = f"entp train {name}", "task"
    if task.only_tests:
        command, prefix = f"entp evaluate RUN --on {name}", "on"
    options = [f"  {_option(prefix, f.name)} {getattr(task, f.name)}" for f in fields(task)]
    parts = [
        f"{task.name}: {task.about}",
        task.draw(),
        "\n".join([f"{command} takes:", *options]),
        "\n".join(["metrics:", *map(_metric, task.metrics)]),
    ]
    if task.baselines():
        parts.append(f"baselines: {', '.join(task.baselines())}")
    return "\n\n".join(parts)


def _option(prefix: str, field: str) -> str:
    return f"--{prefix}.{field.replace('_', '-')}"


def _metric(metric: Metric) -> str:
    """A line about a metric: unit, direction, slices."""
    by = f", --by {' or '.join(metric.slices)}" if metric.slices else ""
    return f"  {metric.name} (per {metric.unit}, {metric.better} is better{by})"
