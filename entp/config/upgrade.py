"""Saved configurations of earlier versions under today's names.

A field that was renamed has a line in RENAMED; one whose default changed, a line in DEFAULTS with
the value that files without it mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    data = _renamed(data, "")
    for part in ("model", "optim", "train"):
        if isinstance(data.get(part), dict):
            fields = _renamed(data[part], part)
            gone = GONE.get(part, {})
            kept = {k: v for k, v in fields.items() if not (k in gone and v == gone[k])}
            data[part] = {**DEFAULTS.get(part, {}), **kept}
    if isinstance(data.get("task"), dict):
        data["task"] = _task(data["task"])
    if isinstance(data.get("optim"), dict):
        data |= _techniques(data["optim"])
    if "start" in data:
        data["curriculum"] = _curriculum(data.pop("start"))
    if isinstance(data.get("mode"), str):
        data["mode"] = MODES.get(data["mode"], data["mode"])
    train = data.get("train")
    if isinstance(train, dict) and "monitor" in train:
        train["monitor"] = METRICS.get(train["monitor"], train["monitor"])
    return data


def upgrade_values(values: dict[str, Any]) -> dict[str, Any]:
    """Measured values under today's names."""
    return {METRICS.get(name, name): value for name, value in values.items()}


def _renamed(fields: dict[str, Any], part: str) -> dict[str, Any]:
    names = RENAMED.get(part, {})
    return {names.get(name, name): value for name, value in fields.items()}


def _task(fields: dict[str, Any]) -> dict[str, Any]:
    names = TASK_FIELDS.get(str(fields.get("name")), {})
    return {names.get(name, name): value for name, value in fields.items()}


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


def _curriculum(start: Any) -> dict[str, Any] | None:
    if not isinstance(start, dict) or not start.get("steps"):
        return None
    mode = start.get("mode", "decoder")
    return {
        "steps": start["steps"],
        "mode": MODES.get(mode, mode),
        "batch_size": start.get("batch") or None,
        "lr": start.get("max_lr") or None,
        "uniform_lengths": start.get("even", False),
    }


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
