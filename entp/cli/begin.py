"""What `entp train TASK --init RUN` takes over from RUN: its model, its mode and its tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from entp import pretrained
from entp.config import SIZES, Mode, ModelConfig
from entp.config.json import model_from_json, run_from_json
from entp.config.upgrade import upgrade_config
from entp.errors import InputError
from entp.files import parse_json
from entp.tasks.base import TASKS, Task
from entp.tasks.tokens import tokenizer_of_run

TASK_DECIDES = ("vocab", "input_dim", "outputs")
"""Fields of the model that follow from the task."""


class Beginning(NamedTuple):
    """What a run takes over from the one that it begins with."""

    model: ModelConfig
    mode: Mode
    tokenizer: str
    config: dict[str, Any]
    """The whole configuration."""

    def own_task(self, kind: type[Task]) -> Task | None:
        """The run's task if it is of this kind."""
        named = self.config.get("task")
        name = named.get("name") if isinstance(named, dict) else None
        if name is None or TASKS.get(name) != f"{kind.__module__}:{kind.__qualname__}":
            return None
        return run_from_json(self.config).task

    def task(self, kind: type[Task]) -> Task | None:
        """The task with the run's tokenizer and context length, if it has fields for them; None
        if another field must be given."""
        own = {"tokenizer": self.tokenizer, "block": self.model.context_length}
        names = {f.name for f in dataclasses.fields(kind)}
        try:
            return kind(**{name: value for name, value in own.items() if name in names})
        except TypeError:
            return None

    def model_for(self, task: Task, size: str | None, changes: dict[str, Any]) -> ModelConfig:
        """The run's model with the inputs and outputs of a task, and with these changes."""
        needs = task.model_needs()
        own = {name: needs.get(name) for name in TASK_DECIDES}
        return dataclasses.replace(
            self.model, **{**own, **(SIZES[size] if size is not None else {}), **changes}
        )


def read_beginning(folder: Path) -> Beginning:
    """What the run in this folder, or one that comes with entp, hands on; its own task need not be
    at hand."""
    if not folder.is_dir() and str(folder) in pretrained.names():
        folder = pretrained.HERE / folder
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"there is no run folder {folder} to begin with: give --init the --out of an `entp "
            "train`, or an exported model."
        )
    try:
        data = upgrade_config(parse_json(path.read_text()))
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    model = model_from_json(data, str(path))
    return Beginning(model, data.get("mode", "entp"), tokenizer_of_run(folder), data)
