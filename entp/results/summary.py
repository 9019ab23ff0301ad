"""Numbers of an arm over its seeds, computed from its runs.

An interval is over seeds: Student's t. One seed has only the interval that other test sequences
would give, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from entp.results.schema import ArmRecord, ArmSummary, Estimate, Record, RunRecord, RunTest
from entp.stats import t_interval
from entp.tasks.metrics import Sums, Totals

Source = Literal["test", "generated"]
ONE_SEED = "one seed, test sampling only"


def summarise(record: Record) -> Record:
    """The record with a summary of each arm."""
    arms = {
        label: arm.model_copy(update={"summary": summary(record, arm)})
        for label, arm in record.arms.items()
    }
    return record.model_copy(update={"arms": arms})


def summary(record: Record, arm: ArmRecord) -> ArmSummary:
    """An arm's test, generated and validation values, each with its interval."""
    names = [metric.name for metric in record.metrics]

    def each(found: Callable[[str], Estimate | None]) -> dict[str, Estimate]:
        return {name: one for name in names if (one := found(name)) is not None}

    return ArmSummary(
        status=status(arm),
        test=each(lambda name: estimate(record, arm, name)),
        generated=each(lambda name: estimate(record, arm, name, "generated")),
        validation=each(lambda name: best(arm, name)),
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
    totals = [one for one in totals_of(record, arm, source) if metric in one.all]
    return _estimate(
        [one.value(metric) for one in totals],
        [one.all[metric] for one in totals],
        lambda: totals[0].interval(metric),
    )


def sliced(record: Record, arm: ArmRecord, metric: str, by: str) -> dict[str, Estimate]:
    """A metric on test sequences in each bin of a slice, in order."""
    totals = totals_of(record, arm)
    keys = dict.fromkeys(key for one in totals for key in one.sliced(metric, by))
    return {key: found for key in keys if (found := _bin(totals, metric, by, key)) is not None}


def _bin(totals: list[Totals], metric: str, by: str, key: str) -> Estimate | None:
    there = [one for one in totals if key in one.slices.get(metric, {}).get(by, {})]
    return _estimate(
        [one.sliced(metric, by)[key] for one in there],
        [one.slices[metric][by][key] for one in there],
        lambda: there[0].sliced_interval(metric, by, key),
    )


def _estimate(
    values: list[float],
    sums: list[Sums],
    of_one: Callable[[], tuple[float, float] | None],
) -> Estimate | None:
    """The mean of the seeds' values, with an interval over seeds or, of one, over sequences."""
    if not values:
        return None
    mean = sum(values) / len(values)
    if len(values) == 1:
        interval = of_one()
        return Estimate(mean=mean, interval=_ends(interval), basis=ONE_SEED)
    interval = t_interval(values)
    if interval is not None and all(one.counts() for one in sums):
        interval = max(0.0, interval[0]), min(1.0, interval[1])
    return Estimate(mean=mean, interval=_ends(interval), basis=f"{len(values)} seeds")


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


def values_of(record: Record, arm: ArmRecord, metric: str) -> list[float]:
    """The test value of each seed."""
    return [one.value(metric) for one in totals_of(record, arm) if metric in one.all]


def totals_of(record: Record, arm: ArmRecord, source: Source = "test") -> list[Totals]:
    """The test totals of each seed that has some."""
    return [totals for run in arm.runs if (totals := run_totals(record, run, source)) is not None]


def run_totals(record: Record, run: RunRecord, source: Source = "test") -> Totals | None:
    if run.test is None:
        return None
    data = run.test.totals if source == "test" else run.test.generated
    return None if data is None else data.totals(record.metrics)


def tests_of(arms: Iterable[ArmRecord]) -> list[RunTest]:
    """The tests of all runs of these arms."""
    return [run.test for arm in arms for run in arm.runs if run.test is not None]


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
