"""Tasks: one file per family, each a frozen dataclass with a `batch` that is a pure function."""

from entp.tasks.base import IGNORE, TASKS, Batch, Split, Task, task_class

__all__ = ["IGNORE", "TASKS", "Batch", "Split", "Task", "task_class"]
