"""A run as JSON and back, and the hash that tells runs apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from entp.config.model import ModelConfig
from entp.config.optim import OptimConfig
from entp.config.pretrained import AnyModelConfig, PretrainedConfig
from entp.config.run import Run
from entp.config.techniques import TECHNIQUE_CONFIGS
from entp.config.training import TrainConfig
from entp.config.upgrade import upgrade_config
from entp.errors import InputError
from entp.files import parse_json
from entp.tasks.base import TASKS, Task, task_class, task_name

FREE_TO_CHANGE = (
    "steps",
    "train.checkpoint_every",
    "train.checkpoint_seconds",
    "train.log_every",
    "train.logger",
    "train.stop_at",
    "train.max_seconds",
)
"""What may differ when a run is resumed: none of it changes what a step computes."""


def free_to_change(run: Run) -> set[str]:
    """Fields that may differ when this run is resumed; with decay by seconds, the time is part of
    the schedule."""
    by_clock = run.optim.decay_by == "seconds"
    return {path for path in FREE_TO_CHANGE if not (by_clock and path == "train.max_seconds")}


def run_to_json(run: Run) -> dict[str, Any]:
    """A dict of plain values; `run_from_json` gives back an equal run."""
    data = {**dataclasses.asdict(run), "task": task_to_json(run.task)}
    return {name: _plain(value) for name, value in data.items()}


def task_to_json(task: Task) -> dict[str, Any]:
    """A task's name and fields as plain values."""
    return _plain({"name": task_name(task), **dataclasses.asdict(task)})


def _plain(value: Any) -> Any:
    """A value as JSON gives it back: a tuple as a list."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value


def read_run(path: Path) -> Run:
    """The run of a config.json."""
    try:
        return run_from_json(parse_json(path.read_text()), str(path))
    except ValueError as error:
        told = str(error)
        named = told if told.startswith(str(path)) else f"{path} cannot be read: {told}"
        raise InputError(named) from None


def run_from_json(data: Any, where: str = "config") -> Run:
    """The run that `data` describes, in the names of today or of earlier versions.

    Unknown keys and wrong types are errors that name the key, missing ones are defaults. A file
    never makes us import code: a task that is not built in must have been imported before.
    """
    _refuse_huggingface(data, where)
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("task"), dict)
        or "name" not in data["task"]
    ):
        raise InputError(f"{where} is not the configuration of a run: it has no task with a name.")
    data = upgrade_config(data)
    fields = dict(data.pop("task"))
    name = str(fields.pop("name"))
    if name not in TASKS and name.partition(":")[0] not in sys.modules:
        raise InputError(
            f"{where} uses the task {name}, which is not built in: import it first (command line: "
            f"--task {name})."
        )
    parts = {"task": task_class(name), "model": _model_kind(data), "optim": OptimConfig}
    parts |= {"train": TrainConfig, **TECHNIQUE_CONFIGS}
    built: dict[str, Any] = {}
    for part, kind in parts.items():
        optional = part in TECHNIQUE_CONFIGS
        values = fields if part == "task" else data.pop(part, None if optional else {})
        built[part] = None
        if values is not None or not optional:
            built[part] = _build(part, kind, values, where)
    unknown = set(data) - {f.name for f in dataclasses.fields(Run)}
    if unknown:
        raise InputError(f"{where} has unknown keys: {', '.join(sorted(unknown))}.")
    return Run(**built, **data)


def _model_kind(data: dict[str, Any]) -> type:
    """Which configuration the model of a run has."""
    model = data.get("model")
    is_pretrained = isinstance(model, dict) and "huggingface" in model
    return PretrainedConfig if is_pretrained else ModelConfig


def model_from_json(data: Any, where: str) -> AnyModelConfig:
    """The model's part of a configuration, whatever the rest says."""
    _refuse_huggingface(data, where)
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise InputError(f"{where} does not describe a model: it has no 'model'.")
    upgraded = upgrade_config({"model": data["model"]})
    return _build("model", _model_kind(upgraded), upgraded["model"], where)


def _refuse_huggingface(data: Any, where: str) -> None:
    """InputError for the configuration of a model in HuggingFace's format."""
    if isinstance(data, dict) and "model_type" in data and "model" not in data:
        raise InputError(
            f"{where} is of a model in HuggingFace's format ({data['model_type']}), not of a run: "
            "load it with entp.hf.load, or train it with `entp train TASK --init FOLDER`."
        )


def _build(part: str, kind: type, values: Any, where: str) -> Any:
    from pydantic import ValidationError

    try:
        return _reader(kind).validate_python(values)
    except ValidationError as error:
        raise InputError(f"{where} cannot be read: {_explain(part, error)}.") from None


@cache
def _reader(kind: type) -> Any:
    """What reads a part of a configuration; making one takes milliseconds."""
    from pydantic import ConfigDict, TypeAdapter

    kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return TypeAdapter(kind)


def _explain(part: str, error: Any) -> str:
    """pydantic's findings, each with the key it is about."""
    found = []
    for e in error.errors():
        message = str(e["msg"]).removeprefix("Value error, ").rstrip(".")
        if e["type"] != "value_error":
            message = f"{'.'.join([part, *map(str, e['loc'])])}: {message}"
        found.append(message)
    return "; ".join(found)


def identity(run: Run) -> dict[str, Any]:
    """What tells a run from others: its configuration without fields at their defaults, and
    without those that are free to change."""
    free = free_to_change(run)
    found: dict[str, Any] = {"task": {"name": task_name(run.task)}}
    for f in dataclasses.fields(run):
        value = getattr(run, f.name)
        if dataclasses.is_dataclass(value):
            inner = _changed(value, free, f"{f.name}.")
            if inner or f.name in TECHNIQUE_CONFIGS:
                found[f.name] = {**found.get(f.name, {}), **inner}
        elif f.name not in free and value != _default(f):
            found[f.name] = value
    return found


def _changed(config: Any, free: set[str], prefix: str) -> dict[str, Any]:
    """The fields of a config that are not at their defaults."""
    return {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f"{prefix}{f.name}" not in free and getattr(config, f.name) != _default(f)
    }


def _default(f: dataclasses.Field) -> Any:
    """The default of a field; a value that nothing equals if it has none."""
    made = f.default_factory
    return f.default if made is dataclasses.MISSING else made()


def config_hash(run: Run) -> str:
    """Ten characters that change whenever what a step computes or an evaluation measures does."""
    text = json.dumps(identity(run), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]
