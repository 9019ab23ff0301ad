"""Numbers of an arm over its seeds, computed from its runs.

An interval is over seeds: Student's t, 95 %. One seed has only the interval that other test
sequences would give, and says so: 95 %, or 90 % by a bootstrap where the recipe asked for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from entp.results.schema import (
    PERMUTED,
    SPLIT,
    ArmRecord,
    ArmSummary,
    Ends,
    Estimate,
    MetricSpec,
    Point,
    Record,
    RunRecord,
    Source,
    TotalsData,
)
from entp.stats import t_interval
from entp.tasks.metrics import Sums, Totals

SOURCES: dict[Source, str] = {
    "test": "best checkpoint",
    "generated": "generated answers",
    "last": "last checkpoint",
    "best": "best evaluation on the test itself",
}
"""What test values are of, in words."""
ONE_SEED = "one seed, test sampling only"
Baselines = dict[str, Totals]
"""What baselines measured, by name."""
BOOTSTRAP = "one seed, {:g} % bootstrap over test sequences"


def summarise(record: Record) -> Record:
    """The record with a summary of each arm."""
    arms = {
        label: arm.model_copy(update={"summary": summary(record, arm)})
        for label, arm in record.arms.items()
    }
    return record.model_copy(update={"arms": arms})


def summary(record: Record, arm: ArmRecord) -> ArmSummary:
    """An arm's test values of every source and its validation values, each with its interval."""
    names = [metric.name for metric in record.metrics]

    def each(found: Callable[[str], Estimate | None]) -> dict[str, Estimate]:
        return {name: one for name in names if (one := found(name)) is not None}

    def on(source: Source) -> dict[str, Estimate]:
        return each(lambda name: estimate(record, arm, name, source))

    return ArmSummary(
        status=status(arm),
        test=on("test"),
        generated=on("generated"),
        last=on("last"),
        best=on("best"),
        validation=each(lambda name: best(arm, name)),
        splits={split: on(SPLIT + split) for split in splits_of([arm])},
    )


def status(arm: ArmRecord) -> str:
    """How far the seeds of an arm are: "done", "done, 1 seed not run"."""
    told = list(dict.fromkeys(run.status for run in arm.runs))
    idle = len(set(arm.seeds) - {run.seed for run in arm.runs})
    if not told:
        return "not run"
    if idle:
        told.append(f"{idle} {_plural('seed', idle)} not run")
    if any(run.done and run.test is None for run in arm.runs):
        told.append("untested")
    return ", ".join(told)


def estimate(
    record: Record, arm: ArmRecord, metric: str, source: Source = "test"
) -> Estimate | None:
    """A metric on test sequences; None where it was not measured."""
    totals = totals_of(record, arm, source)
    sums = [t.all[metric] for t in totals if metric in t.all]
    found = _estimate(record.metric(metric), sums, record.one_test)
    return _resampled(found, arm, source, metric)


def sliced(
    record: Record, arm: ArmRecord, metric: str, by: str, source: Source = "test"
) -> dict[str, Estimate]:
    """A metric on test sequences in each bin of a slice."""
    bins: dict[str, list[Sums]] = {}
    for totals in totals_of(record, arm, source):
        for key, sums in totals.slices.get(metric, {}).get(by, {}).items():
            bins.setdefault(key, []).append(sums)
    spec, same = record.metric(metric), record.one_test
    found = {
        key: _resampled(_estimate(spec, sums, same), arm, source, metric, by, key)
        for key, sums in bins.items()
    }
    return {key: one for key, one in found.items() if one is not None}


def _resampled(
    found: Estimate | None, arm: ArmRecord, source: Source, metric: str, by: str = "", bin: str = ""
) -> Estimate | None:
    """An estimate of one seed with the interval of its bootstrap, where it has one."""
    tests = [run.test for run in arm.runs if run.test is not None]
    if found is None or found.basis != ONE_SEED or source != "test" or len(tests) != 1:
        return found
    bootstrap = tests[0].bootstrap
    if bootstrap is None:
        return found
    ends: Ends | None = bootstrap.all.get(metric)
    if by:
        ends = bootstrap.slices.get(metric, {}).get(by, {}).get(bin)
    if ends is None:
        return found
    basis = BOOTSTRAP.format(100 * bootstrap.level)
    return found.model_copy(update={"interval": ends, "basis": basis})


def _estimate(metric: MetricSpec, seeds: list[Sums], same: bool) -> Estimate | None:
    """The mean of the seeds' values, with an interval over seeds or, of one, over sequences; same:
    whether all seeds have the same sequences."""
    values = [metric.shown(sums.mean) for sums in seeds if sums.w]
    if not values:
        return None
    mean = sum(values) / len(values)
    sampling = _sampling(metric, seeds, same)
    if len(values) == 1:
        return Estimate(mean=mean, interval=_ends(sampling), basis=ONE_SEED)
    over_seeds = _over_seeds(metric, values, sampling)
    return Estimate(mean=mean, interval=_ends(over_seeds), basis=f"{len(values)} seeds")


def _sampling(metric: MetricSpec, seeds: list[Sums], same: bool) -> tuple[float, float] | None:
    """What other test sequences would give, for these very checkpoints."""
    total = sum(seeds, Sums())
    if same:
        total = _of_one(total, len(seeds))
    found = total.interval(bounds=metric.bounds)
    if found is None:
        return None
    return bounded(metric, metric.shown(found[0]), metric.shown(found[1]))


def _of_one(total: Sums, seeds: int) -> Sums:
    """The mean seed: several seeds know no more of the same sequences than one."""
    v, w = total.v / seeds, total.w / seeds
    squares = [None if x is None else x / seeds for x in (total.vv, total.vw, total.ww)]
    return Sums(round(total.n / seeds), v, w, *squares)


def bounded(metric: MetricSpec, low: float, high: float) -> tuple[float, float]:
    """An interval that ends where the metric does."""
    least, most = metric.bounds or (low, high)
    return max(low, least), min(high, most)


def _over_seeds(
    metric: MetricSpec, values: list[float], sampling: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Student's interval, but no narrower than test sampling: seeds that agree by chance, all at 0
    say, know no more than their sequences do."""
    found = t_interval(values)
    if found is None:
        return None
    low, high = found
    if sampling is not None:
        low, high = min(low, sampling[0]), max(high, sampling[1])
    return bounded(metric, low, high)


def _ends(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def best(arm: ArmRecord, metric: str) -> Estimate | None:
    """The mean over seeds of the best validation values, as the paper's tables have it."""
    values = [run.best[metric] for run in arm.runs if metric in run.best]
    if not values:
        return None
    interval = _ends(t_interval(values))
    basis = f"{len(values)} {_plural('seed', len(values))}"
    return Estimate(mean=sum(values) / len(values), interval=interval, basis=basis)


def at_axis(point: Point, axis: str) -> float | None:
    """How far training was at an evaluation; None where that is not known."""
    found = {"seconds": point.seconds, "flops": point.flops, "sequences": point.sequences}
    return found.get(axis, point.step)


def until(run: RunRecord, metric: MetricSpec, value: float, axis: str) -> float:
    """How far training was at the first evaluation that had this value or a better one; infinity
    if none had it, or nobody knows."""
    for point in run.curve:
        found = point.values.get(metric.name)
        if found is None:
            continue
        if found >= value if metric.better == "higher" else found <= value:
            at = at_axis(point, axis)
            return math.inf if at is None else float(at)
    return math.inf


def values_within(arm: ArmRecord, metric: str, axis: str, most: float) -> list[float]:
    """Of each seed that has one, the last validation value within so many sequences, FLOPs or
    seconds."""
    found = []
    for run in arm.runs:
        known = [
            point.values[metric]
            for point in run.curve
            if metric in point.values and (at := at_axis(point, axis)) is not None and at <= most
        ]
        found += known[-1:]
    return found


def values_of(
    record: Record,
    arm: ArmRecord,
    metric: str,
    source: Source = "test",
    by: str = "",
    bin: str = "",
) -> list[float]:
    """The test value of each seed; with a slice and a bin, in that bin."""
    totals = totals_of(record, arm, source)
    if by:
        sums = [t.slices.get(metric, {}).get(by, {}).get(bin) for t in totals]
    else:
        sums = [t.all.get(metric) for t in totals]
    shown = record.metric(metric).shown
    return [shown(one.mean) for one in sums if one is not None and one.w]


def totals_of(record: Record, arm: ArmRecord, source: Source = "test") -> list[Totals]:
    """The test totals of each seed that has some."""
    return [totals for run in arm.runs if (totals := run_totals(record, run, source)) is not None]


def run_totals(record: Record, run: RunRecord, source: Source = "test") -> Totals | None:
    """The test totals of a run; None where there are none."""
    data = _totals_data(run, source)
    return None if data is None else data.totals(record.metrics)


def _totals_data(run: RunRecord, source: Source) -> TotalsData | None:
    if source == "best":
        found = run.best_of_splits.get("test")
        return None if found is None else found.totals
    if run.test is None:
        return None
    if source.startswith(SPLIT):
        return run.test.splits.get(source.removeprefix(SPLIT))
    return {"test": run.test.totals, "generated": run.test.generated, "last": run.test.last}[source]


def splits_of(arms: Iterable[ArmRecord]) -> list[str]:
    """The further splits that some run was tested on."""
    tests = [run.test for arm in arms for run in arm.runs if run.test is not None]
    return list(dict.fromkeys(split for test in tests for split in test.splits))


def baselines_of(record: Record, arms: Iterable[ArmRecord], source: Source = "test") -> Baselines:
    """The totals of the baselines that answered test sequences of these arms' task, or of one of
    their tasks, by name; of several, those of the first. A baseline measures the best checkpoint's
    test or a further split, and nothing else."""
    split = source.removeprefix(SPLIT)
    tasks = [run.config["task"] for arm in arms for run in arm.runs]
    found: Baselines = {}
    if source != "test" and not source.startswith(SPLIT):
        return found
    trained_on = {task.get("name") for task in tasks}
    for one in record.baselines:
        # runs may be tested on another task than they are trained on, all of them on one
        other = bool(tasks) and one.task.get("name") not in trained_on
        if one.split == split and (other or any(_is_same(one.task, task) for task in tasks)):
            for name, data in one.totals.items():
                found.setdefault(name, data.totals(record.metrics))
    return found


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two configurations of tasks agree; a field that only one has is newer than the
    other."""
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def sources_of(record: Record) -> list[Source]:
    """The sources that some run of the record has, the best checkpoint first; without further
    splits."""
    runs = [run for arm in record.arms.values() for run in arm.runs]
    return [s for s in SOURCES if any(_totals_data(run, s) is not None for run in runs)]


def source_label(record: Record, source: Source) -> str:
    """What the values of a source are, in words; of the best evaluations, also how many there
    were."""
    runs = [run for arm in record.arms.values() for run in arm.runs]
    counts = [best.evaluations for run in runs if (best := run.best_of_splits.get("test"))]
    if source != "best" or not counts:
        return source_words(source)
    many = " to ".join(str(n) for n in sorted({min(counts), max(counts)}))
    return f"{SOURCES[source]}, {many} {_plural('evaluation', max(counts))}"


def source_words(source: Source) -> str:
    """What values of a source are of, whatever the record."""
    if source == SPLIT + PERMUTED:
        return "variance of the answer over orders of the examples"
    if source.startswith(SPLIT):
        return f"split {source.removeprefix(SPLIT)}"
    return SOURCES[source]


def authors_values(arm: ArmRecord, metric: str, by: str, source: Source) -> dict[str, float]:
    """The authors' values of an arm in bins of a slice; empty where they have none."""
    return {
        key: value
        for one in arm.authors
        if (one.metric, one.by, one.source) == (metric, by, source)
        for key, value in one.values.items()
    }


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
