"""Tables that compare arms: over seeds, at equal training, and by the training they needed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from entp.report.cells import (
    NONE,
    TableText,
    cell_names,
    number,
    span,
    title,
)
from entp.results.schema import (
    ArmRecord,
    MetricSpec,
    Record,
    Table,
)
from entp.results.summary import (
    at_axis,
    run_totals,
    until,
    values_of,
    values_within,
)
from entp.results.verdict import select
from entp.stats import t_interval, t_test, welch_interval, welch_test

REACH_AXES = ("steps", "seconds")
"""What training is counted in up to a value."""
EQUAL = {"sequences": "{:,.0f} sequences", "flops": "{:.3g} FLOPs", "seconds": "{:,.0f} seconds"}
"""What may be made equal, in words."""


def versus_table(record: Record) -> TableText | None:
    """Arms that differ in the factor `table.versus` alone, and those of `table.pairs`, compared
    over their seeds: a row for each pair and metric. None where the recipe asks for none, or no
    pair has values yet."""
    rows = []
    for label, other in pairs_of(record):
        for metric in map(record.metric, cell_names(record)):
            ours, theirs = (
                values_of(record, record.arms[one], metric.name) for one in (label, other)
            )
            if ours and theirs:
                paired = _are_paired(record, label, other, metric.name)
                found = compared(ours, theirs, metric, paired)
                rows.append([label, other, title(metric), *found])
    if not rows:
        return None
    head = ["arm", "against", "metric", "mean, sd, n", "mean, sd, n of the other"]
    return TableText([*head, "difference", "95 % interval", "p"], rows)


def equal_table(record: Record) -> TableText | None:
    """The same pairs at as much training as both have had: the validation values of the first
    metric of the cells at equal sequences, FLOPs and seconds. None where the recipe draws no curves
    against FLOPs, or no pair has any."""
    rows = []
    metric = record.metric(cell_names(record)[0])
    drawn = {figure.x for figure in record.figures if figure.kind == "curves"}
    for label, other in pairs_of(record) if "flops" in drawn else ():
        for axis in EQUAL:
            arms = [record.arms[label], record.arms[other]]
            most = _most(arms, axis)
            if most is not None:
                found = [values_within(arm, metric.name, axis, most) for arm in arms]
                cells = [_spread(v, metric) if v else NONE for v in found]
                rows.append([label, other, _equal(axis, most), *cells])
    if not rows:
        return None
    return TableText(
        ["arm", "against", "at equal", "mean, sd, n", "mean, sd, n of the other"], rows
    )


def _equal(axis: str, most: float) -> str:
    """ "160 sequences", and a short time with its first digits."""
    if axis == "seconds" and most < 10:
        return f"{most:.2g} seconds"
    return EQUAL[axis].format(most)


def _most(arms: list[ArmRecord], axis: str) -> float | None:
    """As much training as every run of these arms has had; None if that is not known of all."""
    ends = [at_axis(run.curve[-1], axis) for arm in arms for run in arm.runs]
    if not all(arm.runs for arm in arms) or None in ends:
        return None
    return min(end for end in ends if end is not None)


def about_equal(record: Record) -> str:
    metric = title(record.metric(cell_names(record)[0]))
    text = (
        f"Validation {metric} of these arms after as much training as both have had, at the last "
        "evaluation within it; the learning rate of the one that goes on had not decayed by then"
    )
    tests = [run.test for arm in record.arms.values() for run in arm.runs]
    most = max((test.concurrent_runs or 1 for test in tests if test is not None), default=1)
    if most > 1:
        text += (
            f". Up to {most} runs shared the device: their seconds are not those of a run alone, "
            "and say little about equal seconds"
        )
    return text


def about_versus(record: Record) -> str:
    """What the comparison is."""
    table = record.table or Table()
    parts = [f"that differ in {table.versus.replace('_', ' ')} alone"] if table.versus else []
    parts += ["that the recipe names"] if table.pairs else []
    test = "Welch"
    if table.paired:
        test = "Student's of the differences between runs of one seed; Welch where seeds differ"
    return (
        f"Arms {' and arms '.join(parts)}, over seeds (sd: standard deviation; interval of the "
        f"difference and two-sided p: {test})"
    )


def pairs_of(record: Record) -> Iterator[tuple[str, str]]:
    """Labels of arms that are compared, each pair once."""
    found = [*_versus_pairs(record)]
    for one, two in record.table.pairs if record.table is not None else ():
        found += [
            (label, other)
            for label in select(record.arms, one)
            for other in select(record.arms, two)
            if label != other
        ]
    yield from dict.fromkeys(found)


def _are_paired(record: Record, label: str, other: str, metric: str) -> bool:
    """Whether runs of one seed are compared with each other: both have values of the same seeds."""
    if record.table is None or not record.table.paired:
        return False
    return _tested_seeds(record, label, metric) == _tested_seeds(record, other, metric)


def _tested_seeds(record: Record, label: str, metric: str) -> list[int]:
    """The seeds of an arm that have a test value, in the order of their values."""
    tested = [(run.seed, run_totals(record, run)) for run in record.arms[label].runs]
    sums = [(seed, totals.all.get(metric)) for seed, totals in tested if totals is not None]
    return [seed for seed, one in sums if one is not None and one.w]


def _versus_pairs(record: Record) -> Iterator[tuple[str, str]]:
    """Labels of arms that agree in all factors but one: its first value with each other one."""
    name = record.table.versus if record.table is not None else ""
    having = {label: arm.factors for label, arm in record.arms.items() if name in arm.factors}
    first = next((factors[name] for factors in having.values()), None)
    for label in (label for label, factors in having.items() if factors[name] == first):
        rest = {**having[label], name: ""}
        for other, factors in having.items():
            if other != label and {**factors, name: ""} == rest:
                yield label, other


def compared(ours: list[float], theirs: list[float], metric: MetricSpec, paired: bool) -> list[str]:
    """The spread of both, their difference with its interval, and p."""
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    interval, p = welch_interval(ours, theirs), welch_test(ours, theirs)
    if paired:
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        interval, p = t_interval(differences), t_test(differences, 0.0)
    return [
        _spread(ours, metric),
        _spread(theirs, metric),
        number(difference, metric),
        NONE if interval is None else " to ".join(number(end, metric) for end in interval),
        NONE if p is None else f"{p:.2g}",
    ]


def _spread(values: list[float], metric: MetricSpec) -> str:
    """Mean, standard deviation and number of seeds."""
    sd = number(statistics.stdev(values), metric) if len(values) > 1 else NONE
    return f"{number(statistics.fmean(values), metric)}, {sd}, {len(values)}"


def reach_table(record: Record) -> TableText | None:
    """Steps and seconds of each arm up to the validation values that the record's table names; None
    without arms that have run."""
    values = record.table.reach if record.table is not None else ()
    arms = {label: arm for label, arm in record.arms.items() if arm.runs}
    if not values or not arms:
        return None
    metric = record.metric(cell_names(record)[0])
    head = [f"{axis} to {number(value, metric)}" for value in values for axis in REACH_AXES]
    rows = []
    for label, arm in arms.items():
        cells = [
            _span_until([until(run, metric, value, axis) for run in arm.runs])
            for value in values
            for axis in REACH_AXES
        ]
        rows.append([label, *cells])
    return TableText(["arm", *head], rows)


def _span_until(found: list[float]) -> str:
    """The least and the most; not reached by some seed or all is said."""
    there = [round(one) for one in found if math.isfinite(one)]
    if not there:
        return "not reached"
    missing = len(found) - len(there)
    return span(there) + (f", {missing} not reached" if missing else "")


def about_reach(record: Record) -> str:
    metric = record.metric(cell_names(record)[0])
    return f"Training up to the first evaluation with this validation {title(metric)}"
