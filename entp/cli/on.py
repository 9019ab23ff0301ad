"""`entp evaluate RUN --on TASK`: a run measured on another task than its own.

The task reads the run's tokens, and as many of them as the run's model does; its own options are
`--on.NAME`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from entp.cli.begin import read_beginning
from entp.cli.parse import named_task
from entp.config import TECHNIQUE_CONFIGS, Run
from entp.errors import InputError
from entp.tasks.base import Task

Options = TypeVar("Options")


def take_on(words: list[str]) -> tuple[str | None, list[str]]:
    """The task after `--on`, None without it, and the other words."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--on":
            rest = words[at + 1 :] if equals else words[at + 2 :]
            found = value if equals else "".join(words[at + 1 : at + 2])
            if not found or found.startswith("-"):
                raise InputError("--on needs the name of a task: `entp tasks` lists them.")
            return found, [*words[:at], *rest]
    return None, words


def on_options(kind: type[Options], name: str, folder: str) -> Options:
    """The options of a command with those of the task as `on`; by default it is the run's own, or
    reads the run's or the pretrained model's tokens, and a task with an end is measured as a
    whole."""
    task = named_task(name)
    run = read_beginning(Path(folder))
    first = run.measured_on(task)
    if first is None:
        raise InputError(f"--on {name}: a field of this task has no default.")
    whole = task.split_batches is not Task.split_batches
    made: Any = dataclasses.make_dataclass(
        kind.__name__,
        [("on", task, dataclasses.field(default=first))],
        bases=(kind,),
        frozen=True,
        namespace={"__doc__": kind.__doc__},
    )
    return made(batches="all") if whole else made()


def run_on(run: Run, task: Task) -> Run:
    """The run as if it had been trained on this task; InputError where its model does not fit."""
    plain: dict[str, Any] = dict.fromkeys(TECHNIQUE_CONFIGS)
    train = dataclasses.replace(run.train, monitor=None, eval_splits=())
    try:
        return dataclasses.replace(run, task=task, train=train, **plain)
    except InputError as error:
        raise InputError(f"the run cannot be measured on {task.name}: {error}") from None
