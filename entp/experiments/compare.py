"""Runs beside each other: `entp compare RUN RUN ...`.

    record = compared_runs([Path("runs/entp"), Path("runs/decoder")])
    print(comparison(record))

Runs that differ in their seed alone are one arm. An arm is named by what it differs in from the
others. The result is a Record, as recipes have it, so that tables and figures are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from entp.config import Run
from entp.config.json import config_hash, read_run, run_to_json
from entp.data.places import add_place
from entp.errors import InputError
from entp.experiments.collect import folder_record
from entp.experiments.recipe import ArmRun
from entp.report.cells import NONE, TableText, number, title
from entp.report.comparisons import about_equal, compared, equal_table, pairs_of
from entp.results.environment import read_environment
from entp.results.schema import (
    VERSION,
    ArmRecord,
    Estimate,
    Figure,
    MetricSpec,
    Record,
    RunRecord,
    Table,
)
from entp.results.summary import best, bounded, values_of
from entp.terminal import format_table

AXES = ("sequences", "flops", "seconds")
MODES = {"entp": "ENTP"}
"""How modes are called in records."""
UNNAMED = ("seed", "init", "train")
"""Fields that name no arm: `train` decides how a run is watched, unless nothing else differs."""


class Found(NamedTuple):
    """A run folder."""

    folder: Path
    run: Run
    source: str
    """The weights that it began with."""
    record: RunRecord

    @property
    def arm(self) -> str:
        """What runs of one arm have in common."""
        return f"{config_hash(replace(self.run, seed=0, init=''))} {self.source} {self.run.steps}"

    @property
    def config(self) -> dict[str, Any]:
        """What makes the arm, by dotted name."""
        return flat({**run_to_json(self.run), "seed": 0, "init": self.source})


def compared_runs(folders: Sequence[Path], metric: str | None = None) -> Record:
    """A record of these runs; metric: what is compared, else the task's first."""
    found = [read_found(folder) for folder in folders]
    metrics = metrics_of(found, metric)
    arms: dict[str, ArmRecord] = {}
    for label, factors, runs in _arms(found):
        _refuse_twins(runs)
        records = sorted((one.record for one in runs), key=lambda run: run.seed)
        arms[label] = ArmRecord(factors=factors, seeds=[r.seed for r in records], runs=records)
    first, *rest = [arm.factors for arm in arms.values()]
    known = [all(p.flops is not None for one in found for p in one.record.curve)]
    axes = [axis for axis in AXES if axis != "flops" or all(known)]
    return Record(
        schema_version=VERSION,
        recipe="compare",
        title=f"{found[0].run.task.name}: {' and '.join(arms)}",
        question="",
        command="entp compare",
        metrics=metrics,
        table=Table(cells=(metrics[0].name,), pairs=[(first, other) for other in rest]),
        figures=[Figure("curves", x=axis, y=(metrics[0].name,)) for axis in axes],
        arms=arms,
        one_test=all(one.run.task.one_test for one in found),
    )


def read_found(folder: Path) -> Found:
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is no run folder: give the --out of an `entp train`.")
    add_place(folder)  # a run of text keeps what its corpus says
    run, begun = read_run(folder / "config.json"), read_environment(folder).get("init")
    arm = ArmRun(folder.name, run, test_sequences=0, generated_sequences=0)
    record = folder_record(arm, folder)
    if record is None:
        raise InputError(f"{folder} has no evaluation yet: train it further with --resume.")
    return Found(folder, run, str((begun or {}).get("config") or run.init), record)


def metrics_of(found: Sequence[Found], name: str | None) -> list[MetricSpec]:
    """The metrics of the runs' task, the compared one first."""
    tasks = {one.run.task.name: one.folder for one in found}
    if len(tasks) > 1:
        told = ", ".join(f"{folder} {task}" for task, folder in tasks.items())
        raise InputError(f"the runs are of several tasks ({told}): compare runs of one task.")
    metrics = [MetricSpec.of(metric) for metric in found[0].run.task.metrics]
    first = name or found[0].run.monitor
    names = [metric.name for metric in metrics]
    if first not in names:
        raise InputError(
            f"--metric is {first}: the task {found[0].run.task.name} has {', '.join(names)}."
        )
    return sorted(metrics, key=lambda metric: metric.name != first)


def _arms(found: Sequence[Found]) -> list[tuple[str, dict[str, Any], list[Found]]]:
    """Label, factors and runs of each arm, in the order of the first of them."""
    groups: dict[str, list[Found]] = {}
    for one in found:
        groups.setdefault(one.arm, []).append(one)
    configs = [runs[0].config for runs in groups.values()]
    factors = _factors(configs)
    return [(_label(f), f, runs) for f, runs in zip(factors, groups.values(), strict=True)]


def _factors(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each arm the fields in which the arms differ, under their shortest names."""
    paths = dict.fromkeys(path for config in configs for path in config)
    apart = [p for p in paths if len({str(config.get(p, "none")) for config in configs}) > 1]
    named = [p for p in apart if p.split(".")[0] not in UNNAMED] or apart
    names = {path: _short(path, named) for path in named}
    return [
        {names[path]: _value(path, config.get(path, "none")) for path in named}
        for config in configs
    ]


def _short(path: str, others: Sequence[str]) -> str:
    """The end of a dotted name that no other has."""
    parts = path.split(".")
    for count in range(1, len(parts)):
        end = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{end}") for other in others) == 1:
            return end
    return path


def _value(path: str, value: Any) -> Any:
    if path == "mode":
        return MODES.get(value, value)
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_plain else str(value)


def _label(factors: dict[str, Any]) -> str:
    """ "ENTP, lr 0.001"."""
    told = []
    for name, value in factors.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        told.append(text if name == "mode" else f"{name} {text}")
    return ", ".join(told) or "all"


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Plain values by dotted names."""
    if not isinstance(value, dict):
        return {path: "none" if value is None else value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= flat(inner, f"{path}.{name}" if path else name)
    return found


def _refuse_twins(runs: Sequence[Found]) -> None:
    seen: dict[int, Path] = {}
    for one in runs:
        if one.run.seed in seen:
            raise InputError(
                f"{seen[one.run.seed]} and {one.folder} hold the same run, seed {one.run.seed}: "
                "give one of them."
            )
        seen[one.run.seed] = one.folder


def comparison(record: Record) -> str:
    """Tables for the terminal: the arms, their differences over seeds, and at equal training."""
    parts = [printed("", _arms_table(record))]
    if any(pairs_of(record)):
        parts.append(printed(_about_differences(record), _differences(record)))
    equal = equal_table(record)
    if equal is not None:
        parts.append(printed(f"{about_equal(record)}:", equal))
    return "\n\n".join([*parts, *_notes(record)])


def printed(about: str, table: TableText) -> str:
    text = format_table(table.head, table.rows)
    return f"{about}\n\n{text}" if about else text


def _arms_table(record: Record) -> TableText:
    """How much each arm has trained, and its best and last validation value."""
    metric = record.metrics[0]
    head = ["arm", "which seeds", "steps", "sequences", "FLOPs", "seconds"]
    head += [f"best {title(metric)}", "95 % interval over seeds", "at the last evaluation"]
    return TableText(head, [_arm_row(label, arm, metric) for label, arm in record.arms.items()])


def _arm_row(label: str, arm: ArmRecord, metric: MetricSpec) -> list[str]:
    runs = arm.runs
    ends = [run.curve[-1] for run in runs]
    flops = [point.flops for point in ends if point.flops is not None]
    found = best(arm, metric.name)
    last = [point.values[metric.name] for point in ends if metric.name in point.values]
    return [
        label,
        ", ".join(str(seed) for seed in arm.seeds),
        _ends([run.steps for run in runs]),
        _ends([run.sequences for run in runs]),
        NONE if len(flops) < len(runs) else f"{max(flops):.3g}",
        _ends([round(run.seconds) for run in runs]),
        NONE if found is None else number(found.mean, metric),
        _interval(found, metric),
        NONE if not last else number(sum(last) / len(last), metric),
    ]


def _ends(values: Sequence[int]) -> str:
    return " to ".join(f"{value:,}" for value in sorted({min(values), max(values)}))


def _interval(found: Estimate | None, metric: MetricSpec) -> str:
    if found is None or found.interval is None:
        return NONE
    return between(bounded(metric, *found.interval), metric)


def between(ends: Sequence[float], metric: MetricSpec) -> str:
    return " to ".join(number(end, metric) for end in ends)


def _about_differences(record: Record) -> str:
    return (
        f"{_about_values(record)} over seeds (sd: standard deviation; interval of the difference "
        "and two-sided p: Welch):"
    )


def _about_values(record: Record) -> str:
    tested = "test" if _all_tested(record) else "best validation"
    return f"{tested[0].upper()}{tested[1:]} {title(record.metrics[0])}"


def _all_tested(record: Record) -> bool:
    return all(run.test is not None for arm in record.arms.values() for run in arm.runs)


def _differences(record: Record) -> TableText:
    """The first arm against each other one."""
    metric = record.metrics[0]
    rows = []
    for label, other in pairs_of(record):
        ours, theirs = (_values(record, record.arms[one]) for one in (label, other))
        if ours and theirs:
            rows.append([label, other, *compared(ours, theirs, metric, paired=False)])
    head = ["arm", "against", "mean, sd, n", "mean, sd, n of the other", "difference"]
    return TableText([*head, "95 % interval", "p"], rows)


def _values(record: Record, arm: ArmRecord) -> list[float]:
    metric = record.metrics[0].name
    if _all_tested(record):
        return values_of(record, arm, metric)
    return [run.best[metric] for run in arm.runs if metric in run.best]


def _notes(record: Record) -> list[str]:
    """What a reader must know."""
    arms = record.arms.values()
    devices = {run.environment.device for arm in arms for run in arm.runs}
    told = []
    if len(devices) > 1:
        told.append(f"Several devices ({', '.join(sorted(devices))}): seconds do not compare.")
    if any(len(arm.runs) < 2 for arm in arms):
        told.append("An arm of one seed has no interval: other seeds may differ by more.")
    unfinished = [
        f"{label}, seed {run.seed}: {run.status}"
        for label, arm in record.arms.items()
        for run in arm.runs
        if not run.done
    ]
    return [*told, *([f"Not finished: {'; '.join(unfinished)}."] if unfinished else [])]
