"""What runs left, gathered into a record: from run folders, and from records of other machines.

Runs are found by their configuration, never by a name: a folder or a record from before an arm got
its label is found as well.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from entp.config import Run
from entp.config.json import config_hash, read_run, run_from_json, run_to_json, task_to_json
from entp.errors import InputError
from entp.experiments.cost import flops_by
from entp.experiments.recipe import ArmRun
from entp.files import parse_json, write_file
from entp.results.environment import read_environment
from entp.results.schema import (
    BaselineRecord,
    Environment,
    Point,
    Record,
    RunRecord,
    RunTest,
    SplitBest,
    SplitPoint,
    TotalsData,
    measured,
    parse,
)
from entp.results.store import better_run, compact_json
from entp.results.upgrade import upgrade_test
from entp.tasks.base import Task
from entp.tasks.metrics import Metric, Sums, Totals
from entp.training.loggers import read_own_metrics
from entp.training.plan import Plan
from entp.training.stopping import stop_reason

POINTS = 160
"""Evaluations of a run that a record keeps at most, evenly spread; besides, those that first
reached what its recipe asks for."""
MOST_BINS = 40
"""Bins of a slice that a record keeps of every evaluation on a further split; of slices with more,
only the best of all evaluations."""
TEST, OLD_TEST = "test", "final.json"
Kept = dict[str, RunRecord]
"""Recorded runs by the hash of their configuration."""
Rows = list[dict[str, Any]]
Streams = dict[tuple[Any, ...], tuple[ArmRun, BaselineRecord]]
"""Test sequences by what tells them apart: a run that is tested on them, and what baselines
answered to them."""


def find_folder(arm: ArmRun, root: Path) -> Path:
    """The folder below `root` that holds this run under any name, or the name that it will get."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", arm.label).strip("-")
    new = root / f"{plain}-{arm.hash}"
    found = [path for path in sorted(root.glob("*/config.json")) if _hash(path) == arm.hash]
    if not found or new / "config.json" in found:
        return new
    return found[0].parent


def _hash(path: Path) -> str | None:
    return _hash_at(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4096)
def _hash_at(path: Path, _changed: int) -> str | None:
    """The hash of a config.json; None, with a warning, for one that cannot be read."""
    try:
        origin = read_environment(path.parent).get("init")
        return _identity(read_run(path), origin and origin.get("config"))
    except InputError as error:
        print(f"{path.parent} is passed over: {error}", file=sys.stderr)
        return None


def _identity(run: Run, source: str | None) -> str:
    """The hash that an arm of this run has; source: that of the run whose weights it began with."""
    return config_hash(replace(run, init="")) + ((source or run.init) if run.init else "")


def read_test(folder: Path, run: Run, name: str = TEST) -> RunTest | None:
    """What was measured of a run's best checkpoint; None if that has to be done, or done again
    because the file is damaged."""
    for file in (f"{name}.json", *([OLD_TEST] if name == TEST else [])):
        try:
            found = parse_json((folder / file).read_text())
            return parse(RunTest, upgrade_test(found, run.batch_size))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def write_test(folder: Path, test: RunTest, name: str = TEST) -> None:
    data = test.model_dump(mode="json", exclude_defaults=True)
    write_file(folder / f"{name}.json", f"{compact_json(data)}\n".encode())


def collect(blank: Record, arms: list[ArmRun], root: Path, kept: Kept) -> Record:
    """The record with every run that its folder holds or that was kept, whichever is better."""
    found: dict[str, list[RunRecord]] = {label: [] for label in blank.arms}
    for arm in arms:
        run = better_run(read_folder(arm, root), kept.get(arm.hash))
        if run is not None:
            found[arm.label].append(_with_flops(arm.run, run))
    filled = {
        label: arm.model_copy(update={"runs": found[label]}) for label, arm in blank.arms.items()
    }
    return blank.model_copy(update={"arms": filled})


def _with_flops(run: Run, found: RunRecord) -> RunRecord:
    """A record with the operations of its evaluations: old ones have none."""
    if all(point.flops is not None for point in found.curve):
        return found
    flops = flops_by(run, [point.step for point in found.curve])
    if flops is None:
        return found
    pairs = zip(found.curve, flops, strict=True)
    curve = [point.model_copy(update={"flops": total}) for point, total in pairs]
    return found.model_copy(update={"curve": curve})


def baseline_streams(arms: Sequence[ArmRun], known: Sequence[BaselineRecord]) -> Streams:
    """The test sequences that baselines are to answer, each with the run that they are of: those of
    the first seed of every arm, each once. What is known of them is in it already; what is known of
    others is left out."""
    totals: dict[tuple[Any, ...], dict[str, TotalsData]] = {}
    for one in known:
        totals.setdefault(one.stream, {}).update(one.totals)
    found: Streams = {}
    labels = set()
    for arm in arms:
        if arm.label in labels:
            continue
        labels.add(arm.label)
        for split in ("test", *arm.test_splits):
            one = BaselineRecord(
                task=task_to_json(arm.test_task),
                seed=arm.run.seed,
                split=split,
                batch_size=arm.run.batch_size,
                sequences=arm.test_sequences,
            )
            mine = totals.get(one.stream, {})
            there = {name: mine[name] for name in arm.baseline_names if name in mine}
            found.setdefault(one.stream, (arm, one.model_copy(update={"totals": there})))
    return found


def match_runs(record: Record, arms: list[ArmRun], path: Path, quiet: bool = False) -> Kept:
    """The runs of a record that are runs of these arms, whatever their labels; others are named on
    standard error."""
    ours = {arm.hash: arm for arm in arms}
    kept: Kept = {}
    for label, run in ((label, run) for label, arm in record.arms.items() for run in arm.runs):
        config = run_from_json(run.config, str(path))
        arm = ours.get(_recorded_identity(run, config))
        if arm is not None:
            found = better_run(kept.get(arm.hash), _renewed(run, config))
            kept |= {arm.hash: found} if found is not None else {}
        elif not quiet:
            print(
                f"{path}: {label}, seed {run.seed} has other settings than now, and is left out.",
                file=sys.stderr,
            )
    return kept


def _recorded_identity(run: RunRecord, config: Run) -> str:
    origin = run.environment.init
    return _identity(config, None if origin is None else origin.config)


def _renewed(run: RunRecord, config: Run) -> RunRecord:
    """A recorded run with the hash and the caveats that it has today."""
    try:
        caveats = config.task.caveats(run.sequences)
    except InputError:  # its data is not here
        caveats = run.caveats
    identity = _recorded_identity(run, config)
    return run.model_copy(update={"config_hash": identity, "caveats": caveats})


def add_metrics(blank: Record, record: Record, kept: Kept) -> Record:
    """The blank record with metrics that only the kept runs of another have measured as well."""
    known = {metric.name for metric in blank.metrics}
    needed = set().union(*(measured(run) for run in kept.values())) - known
    more = [metric for metric in record.metrics if metric.name in needed]
    return blank.model_copy(update={"metrics": [*blank.metrics, *more]})


def read_folder(arm: ArmRun, root: Path) -> RunRecord | None:
    """One seed of an arm as its folder below `root` tells it; None before its first evaluation."""
    return folder_record(arm, find_folder(arm, root))


def folder_record(arm: ArmRun, folder: Path) -> RunRecord | None:
    """One seed of an arm as this folder tells it; None before its first evaluation."""
    run = arm.run
    rows = read_own_metrics(folder)
    environment = parse(Environment, read_environment(folder))
    evaluations = [row for row in rows if row["kind"] == "eval"]
    steps = [row for row in rows if row["kind"] == "train"]
    if not evaluations or not steps:
        if any((folder / name).exists() for name in (f"{TEST}.json", OLD_TEST)):
            raise InputError(
                f"{folder} has been tested, but its metrics.jsonl holds no evaluation: put it "
                "back, or remove the folder to train this run again."
            )
        return None
    plan, last = Plan(run), steps[-1]
    sequences = plan.sequences_by(last["step"])
    return RunRecord(
        seed=run.seed,
        status=_status(run, evaluations, last),
        best={} if arm.test_on else _best(run, evaluations),
        test=own_splits(read_test(folder, run, arm.test_name), arm.splits),
        n=evaluations[-1]["n"],
        steps=last["step"],
        sequences=sequences,
        seconds=last["seconds"],
        curve=_curve(plan, evaluations, steps, arm.test_on is None, arm.reach),
        splits={} if arm.test_on else _splits(run.task, rows),
        best_of_splits={} if arm.test_on else _best_of_splits(run.task, rows),
        config_hash=arm.hash,
        config=run_to_json(read_run(folder / "config.json")),
        environment=environment,
        caveats=run.task.caveats(sequences),
    )


def own_splits(test: RunTest | None, splits: Sequence[str]) -> RunTest | None:
    """A test with these further splits alone: another recipe may have asked for more."""
    if test is None:
        return None
    kept = {name: test.splits[name] for name in splits if name in test.splits}
    return test.model_copy(update={"splits": kept})


def _status(run: Run, evaluations: Rows, last: dict[str, Any]) -> str:
    """ "done" at the last step or second, once that is evaluated, and where the run may stop."""
    limit = run.train.max_seconds
    over = last["step"] >= run.steps or (limit is not None and last["seconds"] >= limit)
    evaluated = evaluations[-1]["step"] >= last["step"]
    if (over and evaluated) or stop_reason(run, evaluations):
        return "done"
    return f"{last['step']} of {run.steps} steps"


def _best(run: Run, evaluations: Rows) -> dict[str, float]:
    """Of each metric the best value of all evaluations."""
    found = {}
    for metric in run.task.metrics:
        values = [row[metric.name] for row in evaluations if metric.name in row]
        if values:
            found[metric.name] = max(values) if metric.better == "higher" else min(values)
    return found


def _curve(
    plan: Plan,
    evaluations: Rows,
    steps: Rows,
    with_values: bool = True,
    reach: Sequence[tuple[str, float]] = (),
) -> list[Point]:
    """At most POINTS of the evaluations, the last one included, and the first ones that reached
    these values of metrics; without values where the run is tested on something else."""
    names = [metric.name for metric in plan.run.task.metrics] if with_values else []
    some = {id(row) for row in (*_thinned(evaluations), *_first(plan.run, evaluations, reach))}
    kept = [row for row in evaluations if id(row) in some]
    flops = flops_by(plan.run, [row["step"] for row in kept])
    return [
        Point(
            step=row["step"],
            seconds=_seconds(row, steps),
            sequences=plan.sequences_by(row["step"]),
            values={name: row[name] for name in names if name in row},
            flops=None if flops is None else flops[number],
        )
        for number, row in enumerate(kept)
    ]


def _first(run: Run, evaluations: Rows, reach: Sequence[tuple[str, float]]) -> Rows:
    """The first evaluation that reached each of these values, where one did."""
    known, found = {metric.name: metric for metric in run.task.metrics}, []
    for name, value in reach:
        had = (row for row in evaluations if name in row and known[name].reached(row[name], value))
        found += [row for row in (next(had, None),) if row is not None]
    return found


def _thinned(rows: Rows) -> Rows:
    """At most POINTS of these rows, evenly spread, the last one included."""
    stride = -(-len(rows) // POINTS) or 1
    return rows[::-1][::stride][::-1]


def _splits(task: Task, rows: Rows) -> dict[str, list[SplitPoint]]:
    """The evaluations on each further split, without slices of many bins."""
    found: dict[str, list[SplitPoint]] = {}
    for split, own in _by_split(rows).items():
        found[split] = [
            SplitPoint(step=row["step"], totals=TotalsData.of(_few_bins(_totals(task, row))))
            for row in _thinned(own)
        ]
    return found


def _by_split(rows: Rows) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in rows:
        if row["kind"] == "split":
            found.setdefault(row["split"], []).append(row)
    return found


def _totals(task: Task, row: dict[str, Any]) -> Totals:
    return Totals.from_json(task.metrics, row["totals"])


def _few_bins(totals: Totals) -> Totals:
    slices = {
        metric: {name: bins for name, bins in by.items() if len(bins) <= MOST_BINS}
        for metric, by in totals.slices.items()
    }
    return Totals(totals.metrics, totals.all, slices, totals.sequences)


def _best_of_splits(task: Task, rows: Rows) -> dict[str, SplitBest]:
    """Of each further split the best of all its evaluations, metric by metric and bin by bin."""
    found = {}
    for split, own in _by_split(rows).items():
        best = Totals(task.metrics)
        for row in own:
            _keep_best(best, _totals(task, row))
        found[split] = SplitBest(evaluations=len(own), totals=TotalsData.of(best))
    return found


def _keep_best(best: Totals, other: Totals) -> None:
    """Take over every number of `other` that is better."""
    best.sequences = max(best.sequences, other.sequences)
    for metric in best.metrics:
        if metric.name in other.all:
            _keep_better(metric, best.all, metric.name, other.all[metric.name])
        for name, bins in other.slices.get(metric.name, {}).items():
            mine = best.slices.setdefault(metric.name, {}).setdefault(name, {})
            for key, sums in bins.items():
                _keep_better(metric, mine, key, sums)


def _keep_better(metric: Metric, kept: dict[str, Sums], key: str, new: Sums) -> None:
    old = kept.get(key)
    if new.w and (old is None or metric.is_better(new.mean, old.mean)):
        kept[key] = new


def _seconds(row: dict[str, Any], steps: Rows) -> float | None:
    """When an evaluation was made: as it says, or between the training rows beside it; None where
    there are none."""
    if "seconds" in row:
        return float(row["seconds"])
    at, known = [one["step"] for one in steps], [one["seconds"] for one in steps]
    if not at[0] <= row["step"] <= at[-1]:
        return None
    return float(np.interp(row["step"], at, known))
