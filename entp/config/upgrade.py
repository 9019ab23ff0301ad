"""Saved configurations of earlier versions under today's names.

A field that was renamed has a line in RENAMED; one whose default changed, a line in DEFAULTS with
the value that files without it mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from entp.errors import InputError

RENAMED: dict[str, dict[str, str]] = {
    "": {"batch": "batch_size"},
    "model": {
        "positions": "context_length",
        "position": "position_embedding",
        "scale": "attention_scale",
    },
    "optim": {
        "max_lr": "lr",
        "warmup": "warmup_steps",
        "decay": "decay_by",
        "shape": "schedule",
        "clip": "grad_clip",
        "whiten": "precondition_every",
    },
    "train": {
        "target_metric": "monitor",
        "target": "stop_at",
        "graph": "cuda_graph",
        "mirror": "logger",
    },
    "start": {"batch": "batch_size", "max_lr": "lr", "even": "uniform_lengths"},
}
"""Old field to new, by the part of the configuration; "" is the run itself."""
TASK_FIELDS: dict[str, dict[str, str]] = {
    "count2": {"seed_length": "prompt_length", "values": "num_values"},
    "count3": {"seed_length": "prompt_length", "values": "num_values"},
    "match3": {"values": "num_values"},
    "addition": {"examples": "train_examples"},
}
MODES = {"prefix": "prefix-lm", "prefixes": "random-prefix"}
METRICS = {"sequence_accuracy": "exact_match"}
DEFAULTS: dict[str, dict[str, Any]] = {}
GONE: dict[str, dict[str, Any]] = {
    "optim": {"grow_from": None, "grow_at": 0, "late_adamw": 0.0},
    "train": {"compile": False},
}
"""Fields that are gone, and the value at which they did nothing."""


def upgrade_config(data: Any) -> Any:
    """The configuration of a run, or of a model alone, with today's names; what is not one stays
    as it is."""
    if not isinstance(data, dict):
        return data
    data = _renamed(data, RENAMED[""], "")
    for part in ("model", "optim", "train"):
        if isinstance(data.get(part), dict):
            fields = _renamed(data[part], RENAMED[part], part)
            data[part] = {**DEFAULTS.get(part, {}), **_without_gone(fields, part)}
    task = data.get("task")
    if isinstance(task, dict):
        data["task"] = _renamed(task, TASK_FIELDS.get(str(task.get("name")), {}), "task")
    found: dict[str, Any] = {}
    if isinstance(data.get("optim"), dict):
        found |= _techniques(data["optim"])
    if "start" in data:
        found["curriculum"] = _curriculum(data.pop("start"))
    for name, config in found.items():
        if config is not None and data.get(name) is not None:
            raise InputError(f"the configuration says twice what {name} is: in old words and new.")
    data |= {name: config for name, config in found.items() if config is not None}
    _translate(data, "mode", MODES)
    if isinstance(data.get("train"), dict):
        _translate(data["train"], "monitor", METRICS)
    return data


def upgrade_values(values: dict[str, Any]) -> dict[str, Any]:
    """Measured values under today's names."""
    return {METRICS.get(name, name): value for name, value in values.items()}


def _renamed(fields: dict[str, Any], names: dict[str, str], part: str) -> dict[str, Any]:
    """The fields under today's names."""
    where = f"{part}." if part else ""
    for old, new in names.items():
        if old in fields and new in fields:
            raise InputError(
                f"the configuration has {where}{old} and {where}{new}, which are the same: leave "
                f"{old} out."
            )
    return {names.get(name, name): value for name, value in fields.items()}


def _without_gone(fields: dict[str, Any], part: str) -> dict[str, Any]:
    """The fields without those that are gone, which must have done nothing."""
    gone = GONE.get(part, {})
    for name, nothing in gone.items():
        if name in fields and fields[name] != nothing:
            raise InputError(
                f"{part}.{name} is {fields[name]!r}: this version of entp cannot do that, and "
                f"reads only {nothing!r} there. Use the version that wrote it."
            )
    return {name: value for name, value in fields.items() if name not in gone}


def _translate(fields: dict[str, Any], name: str, values: dict[str, str]) -> None:
    """A field's value in today's words, if it has one."""
    if isinstance(fields.get(name), str):
        fields[name] = values.get(fields[name], fields[name])


def _techniques(optim: dict[str, Any]) -> dict[str, Any]:
    """What `optim` once said about techniques, taken out of it."""
    found: dict[str, Any] = {}
    average = optim.pop("average", 0)
    if average:
        found["ema"] = {"steps": average}
    step, size = optim.pop("late_at", 0), optim.pop("late_batch", 0)
    if step or size:
        found["batch_schedule"] = {"step": step, "batch_size": size}
    select, take = optim.pop("select", False), optim.pop("take", 0)
    if take:
        found["importance"] = {"samples": take, "proposal": "decoder"}
    elif select:
        found["importance"] = {"samples": None, "proposal": "entp"}
    return found


def _curriculum(start: Any) -> Any:
    """What `start` said; None if it had no steps."""
    if not isinstance(start, dict):
        return start
    fields = _renamed(start, RENAMED["start"], "start")
    _translate(fields, "mode", MODES)
    for name in ("batch_size", "lr"):
        if fields.get(name) == 0:
            fields[name] = None
    off = {"steps": 0, "mode": "decoder", "batch_size": None, "lr": None, "uniform_lengths": False}
    return None if fields.items() <= off.items() else fields


OPTIONS: dict[str, str] = {
    "--batch": "--batch-size",
    "--which": "--checkpoint",
    "--by-length": "--by length",
    "--by-generation": "--generate",
    "--fresh": "--test-sequences",
    "--minutes": "--max-minutes",
    "--contenders": "--variants",
    "--prompt-tokens": "--prompt-length",
    "--optim.average": "--ema.steps",
    "--optim.late-at": "--batch-schedule.step",
    "--optim.late-batch": "--batch-schedule.batch-size",
    "--optim.take": "--importance.samples N --importance.proposal decoder",
    "--optim.select": "--importance.proposal entp",
    "--start.steps": "--curriculum.steps",
    "--start.mode": "--curriculum.mode",
    "--start.batch": "--curriculum.batch-size",
    "--start.max-lr": "--curriculum.lr",
    "--start.even": "--curriculum.uniform-lengths",
    "--task.seed-length": "--task.prompt-length",
    "--task.values": "--task.num-values",
    "--task.examples": "--task.train-examples",
}
"""Options of the command line that have another name now."""


def _option(part: str, name: str) -> str:
    return f"--{part}.{name}".replace("_", "-")


def _options() -> Callable[[str], str | None]:
    known = dict(OPTIONS)
    for part in ("model", "optim", "train"):
        known |= {_option(part, old): _option(part, new) for old, new in RENAMED[part].items()}
    return known.get


option_today = _options()
"""The name that an option of an earlier version has today; None if it never had another."""
