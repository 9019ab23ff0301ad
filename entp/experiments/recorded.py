"""A run beside recorded ones: is it where other seeds of its settings were?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from entp.config.json import run_from_json, run_to_json
from entp.errors import InputError
from entp.experiments.compare import Found, between, flat, metrics_of, printed, read_found
from entp.report.cells import NONE, TableText, number, title
from entp.results.schema import MetricSpec, Point, Record, RunRecord
from entp.results.store import read_record
from entp.results.summary import bounded
from entp.stats import prediction_interval

STAGES = 5
"""Points of training at which a run is held against recorded ones."""


def against_recorded(folder: Path, path: Path, metric: str | None = None) -> str:
    """A table: the values of a run beside those that other seeds of the same configuration had at
    the same steps, from a file of results."""
    one, recorded = read_found(folder), read_record(path)
    spec = metrics_of([one], metric)[0]
    label, runs = _same_arm(one, recorded, path)
    rows = [_held_against(point, runs, spec) for point in _stages(one.record, spec)]
    head = ["step", f"validation {title(spec)}", "recorded, mean", "one more seed, 95 %", "inside"]
    about = f"{folder} beside {label} of {path}, seeds {', '.join(str(run.seed) for run in runs)}:"
    few = "" if len(runs) > 1 else "\n\nOne recorded seed tells no interval."
    return printed(about, TableText(head, rows)) + few


def _same_arm(one: Found, recorded: Record, path: Path) -> tuple[str, list[RunRecord]]:
    """The recorded arm with this configuration, and its runs of other seeds."""
    nearest: dict[str, list[str]] = {}
    for label, arm in recorded.arms.items():
        for run in arm.runs:
            try:
                config = run_from_json(run.config, str(path))
            except InputError:  # a task that is not imported
                continue
            if config.task.name != one.run.task.name:
                continue
            theirs = flat({**run_to_json(config), "seed": 0, "init": ""})
            ours = {**one.config, "init": ""}
            apart = [
                p
                for p in sorted(ours.keys() | theirs.keys())
                if p.split(".")[0] != "train" and ours.get(p) != theirs.get(p)
            ]
            if not apart:
                others = [r for r in arm.runs if r.config_hash != one.record.config_hash]
                return label, others or arm.runs
            nearest.setdefault(label, [f"{p} {ours.get(p)} and {theirs.get(p)}" for p in apart])
    if not nearest:
        raise InputError(
            f"{path} has no run of the task {one.run.task.name} to compare {one.folder} with."
        )
    label = min(nearest, key=lambda name: len(nearest[name]))
    told = "; ".join(nearest[label][:5])
    raise InputError(
        f"{path} has no run with the settings of {one.folder}. The nearest arm is {label}, which "
        f"differs in {told} (yours and theirs)."
    )


def _stages(run: RunRecord, metric: MetricSpec) -> list[Point]:
    """A few evaluations, evenly spread, the last one included."""
    there = [point for point in run.curve if metric.name in point.values]
    stride = -(-len(there) // STAGES) or 1
    return there[::-1][::stride][::-1]


def _held_against(point: Point, runs: Sequence[RunRecord], metric: MetricSpec) -> list[str]:
    value = point.values[metric.name]
    theirs = [v for run in runs if (v := _at(run, point.step, metric)) is not None]
    row = [f"{point.step:,}", number(value, metric)]
    if not theirs:
        return [*row, NONE, NONE, "not recorded"]
    row.append(number(sum(theirs) / len(theirs), metric))
    ends = prediction_interval(theirs)
    if ends is None:
        return [*row, NONE, NONE]
    return [
        *row,
        between(bounded(metric, *ends), metric),
        "yes" if ends[0] <= value <= ends[1] else "NO",
    ]


def _at(run: RunRecord, step: int, metric: MetricSpec) -> float | None:
    """The validation value at a step, between the evaluations beside it."""
    known = {p.step: p.values[metric.name] for p in run.curve if metric.name in p.values}
    if not known or not min(known) <= step <= max(known):
        return None
    return float(np.interp(step, list(known), list(known.values())))
