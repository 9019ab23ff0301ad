"""A run as JSON and back, and the hash that tells runs apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from entp.config import ModelConfig, OptimConfig, Run, StartConfig, TrainConfig
from entp.errors import InputError
from entp.tasks.base import TASKS, task_class, task_name


def run_to_json(run: Run) -> dict[str, Any]:
    """A dict of plain values; `run_from_json` gives back an equal run."""
    data = dataclasses.asdict(run)
    data["task"] = {"name": task_name(run.task), **data["task"]}
    return data


def parse_json(text: str | bytes) -> Any:
    """json.loads, whose ValueError for what is not JSON is also that for what is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_run(path: Path) -> Run:
    """The run of a config.json."""
    try:
        return run_from_json(parse_json(path.read_text()), str(path))
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}") from None


GONE = {"grow_from": None, "grow_at": 0, "late_adamw": 0.0}
"""Options of the optimizer that files of earlier runs name, and the value at which they did nothing."""


def run_from_json(data: Any, where: str = "config") -> Run:
    """The run that `data` describes; unknown keys and wrong types are errors that name the key, missing ones are defaults.

    A file never makes us import code: a task that is not built in must have been imported by the caller before.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    if not isinstance(data, dict) or not isinstance(data.get("task"), dict) or "name" not in data["task"]:
        raise InputError(f"{where} is not the configuration of a run: it has no task with a name.")
    data = dict(data)
    fields = dict(data.pop("task"))
    name = str(fields.pop("name"))
    if name not in TASKS and name.partition(":")[0] not in sys.modules:
        raise InputError(f"{where} uses the task {name}, which is not built in: import it first (command line: --task {name}).")
    cls = task_class(name)
    parts = {"task": cls, "model": ModelConfig, "optim": OptimConfig, "train": TrainConfig, "start": StartConfig}
    values = {"task": fields, **{name: data.pop(name, {}) for name in parts if name != "task"}}
    values["optim"] = _without_gone(values["optim"])
    built: dict[str, Any] = {}
    for name, kind in parts.items():
        kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
        try:
            built[name] = TypeAdapter(kind).validate_python(values[name])
        except ValidationError as error:
            raise InputError(f"{where} cannot be read: {_explain(name, error)}.") from None
    unknown = set(data) - {f.name for f in dataclasses.fields(Run)}
    if unknown:
        raise InputError(f"{where} has unknown keys: {', '.join(sorted(unknown))}.")
    return Run(**built, **data)


def _without_gone(optim: Any) -> Any:
    """The optimizer's options without those that are gone, where they say what their absence says."""
    if not isinstance(optim, dict):
        return optim
    return {name: value for name, value in optim.items() if not (name in GONE and value == GONE[name])}


def _explain(part: str, error: Any) -> str:
    """pydantic's findings, each with the key it is about."""
    found = []
    for e in error.errors():
        message = str(e["msg"]).removeprefix("Value error, ").rstrip(".")
        found.append(message if e["type"] == "value_error" else f"{'.'.join([part, *map(str, e['loc'])])}: {message}")
    return "; ".join(found)


FREE_TO_CHANGE = ("steps", "train.checkpoint_every", "train.log_every", "train.mirror", "train.target", "train.max_seconds")
"""What may differ when a run is resumed: none of it changes what a step computes."""


ADDED = {"norm_placement": "pre", "bias": True, "tied_head": True, "kv_heads": None, "loops": 1}
"""Options of the model that came later, and their defaults, which do not count: a run keeps its hash."""


def config_hash(run: Run) -> str:
    """Ten characters that change whenever what a step computes or an evaluation measures does."""
    data = run_to_json(run)
    for path in FREE_TO_CHANGE:
        *group, name = path.split(".")
        del (data[group[0]] if group else data)[name]
    for name in ADDED:
        if data["model"][name] == ADDED[name]:
            del data["model"][name]
    if run.optim.decay == "seconds":  # then the time is part of the schedule
        data["train"]["max_seconds"] = run.train.max_seconds
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:10]
