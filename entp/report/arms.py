"""What a page says about each arm by itself: its seeds, where they ran, how they learned, and the
settings in which it differs from the other arms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from entp.report.cells import NONE, TableText, number, title
from entp.results.schema import ArmRecord, MetricSpec, Record, RunRecord
from entp.results.summary import run_totals

Settings = dict[str, str]
"""Settings as texts, by names such as "optim.lr"."""
SEED = "seed"


def shared_settings(record: Record) -> Settings:
    """The settings that all runs of a record have."""
    runs = [run for arm in record.arms.values() for run in arm.runs]
    return _shared([settings(run) for run in runs])


def settings(run: RunRecord) -> Settings:
    """The configuration of a run without its seed."""
    found = dict(_flat(run.config))
    found.pop(SEED, None)
    return found


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else json.dumps(value)


def _shared(found: list[Settings]) -> Settings:
    """What all of these have in common."""
    first = found[0] if found else {}
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in found)
    }


def settings_table(arm: ArmRecord, shared: Settings) -> TableText | None:
    """The settings of an arm that not all runs of the record have; None where there are none."""
    found = {run.seed: settings(run) for run in arm.runs}
    names = dict.fromkeys(name for one in found.values() for name in one if name not in shared)
    rows = [
        [name, _over_seeds({k: one.get(name, NONE) for k, one in found.items()})] for name in names
    ]
    return TableText(["setting", "value"], rows) if rows else None


def _over_seeds(values: dict[int, str]) -> str:
    """A setting that all seeds have, or what each has."""
    different = set(values.values())
    if len(different) == 1:
        return different.pop()
    return "; ".join(f"seed {seed}: {value}" for seed, value in values.items())


def runs_table(record: Record, arm: ArmRecord) -> TableText:
    """How far each seed came, its best validation values, its test value, and when it began."""
    first = record.metrics[0]
    measured = [m for m in record.metrics if any(m.name in run.best for run in arm.runs)]
    head = [SEED, "status", "steps", "sequences", "seconds"]
    head += [f"{title(metric)}: validation" for metric in measured]
    head += [f"{title(first)}: test", "test sequences", "runs at a time", "date"]
    return TableText(head, [_run_row(record, run, measured) for run in arm.runs])


def _run_row(record: Record, run: RunRecord, measured: list[MetricSpec]) -> list[str]:
    tested, first = run_totals(record, run), record.metrics[0]
    at_a_time = run.test.concurrent_runs if run.test is not None else None
    return [
        str(run.seed),
        run.status,
        f"{run.steps:,}",
        f"{run.sequences:,}",
        f"{run.seconds:.0f}",
        *(number(run.best[m.name], m) if m.name in run.best else NONE for m in measured),
        NONE
        if tested is None or first.name not in tested.all
        else number(tested.value(first.name), first),
        NONE if tested is None else f"{tested.sequences:,}",
        NONE if at_a_time is None else str(at_a_time),
        run.environment.date,
    ]


def places_table(arm: ArmRecord) -> TableText:
    """Where the seeds ran, by which code, and what they began with; seeds of one place share a
    row."""
    places: dict[tuple[str, ...], list[str]] = {}
    for run in arm.runs:
        places.setdefault(_place(run), []).append(str(run.seed))
    head = ["seeds", "device", "torch", "python", "entp", "commit", "began with"]
    return TableText(head, [[", ".join(seeds), *place] for place, seeds in places.items()])


def _place(run: RunRecord) -> tuple[str, ...]:
    place = run.environment
    known = (place.device, place.torch, place.python, place.entp, place.commit)
    return (*(text or NONE for text in known), _began(run))


def _began(run: RunRecord) -> str:
    """A new model, or the run that it goes on from; and how often it was resumed."""
    place, text = run.environment, "a new model"
    if place.forked is not None:
        text = f"step {place.forked.step} of {place.forked.run}"
    if place.init is not None:
        text = f"weights of {place.init.run}"
    if place.resumed:
        times = len(place.resumed)
        text += f", resumed {times} times" if times > 1 else ", resumed once"
    return text


def curves_table(record: Record, arm: ArmRecord) -> TableText | None:
    """The validation curve of each seed in brief: its first, best and last value of the first
    metric that validation measures; None where it measures none."""
    points = [point for run in arm.runs for point in run.curve]
    measured = [m for m in record.metrics if any(m.name in point.values for point in points)]
    if not measured:
        return None
    head = [SEED, "evaluations", "first", "at step", "best", "at step", "last", "at step"]
    return TableText(head, [_curve_row(run, measured[0]) for run in arm.runs])


def about_curves(record: Record, arm: ArmRecord) -> str:
    points = [point for run in arm.runs for point in run.curve]
    measured = [m for m in record.metrics if any(m.name in point.values for point in points)]
    return f"Validation {title(measured[0])} during training" if measured else ""


def _curve_row(run: RunRecord, metric: MetricSpec) -> list[str]:
    found = [(p.values[metric.name], p.step) for p in run.curve if metric.name in p.values]
    if not found:
        return [str(run.seed), "0", *[NONE] * 6]
    choose = max if metric.better == "higher" else min
    best = choose(found, key=lambda one: one[0])
    row = [str(run.seed), str(len(found))]
    for value, step in (found[0], best, found[-1]):
        row += [number(value, metric), f"{step:,}"]
    return row
