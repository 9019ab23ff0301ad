"""Tables of a record, for the terminal and for Markdown pages.

A table is a head and rows of plain texts; `format_table` prints it, `markdown_table` escapes it.
"""

from __future__ import annotations

import html
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from entp.results.schema import (
    PERMUTED,
    SPLIT,
    ArmRecord,
    Estimate,
    Factor,
    MetricSpec,
    Record,
    Source,
    Table,
)
from entp.results.summary import (
    Baselines,
    at_axis,
    authors_values,
    baselines_of,
    best,
    estimate,
    run_totals,
    sliced,
    source_label,
    sources_of,
    splits_of,
    status,
    until,
    values_of,
    values_within,
)
from entp.results.verdict import select
from entp.stats import t_interval, t_test, welch_interval, welch_test
from entp.terminal import format_table

NONE = "-"
REACH_AXES = ("steps", "seconds")
"""What training is counted in up to a value."""
MOST_BINS = 20
"""Bins of a slice that a table shows; of more, only the figure tells."""
COLUMNS: dict[Source, str] = {
    "generated": "generated {}",
    "last": "last checkpoint's {}",
    "best": "best {} on the test itself",
}
"""The columns of sources besides the best checkpoint."""


class TableText(NamedTuple):
    head: list[str]
    rows: list[list[str]]


def record_table(record: Record) -> str:
    """The table paper | ours for the terminal, the verdict, the arms that differ in one factor
    compared over seeds, and the tables of training needed, of bins and of further splits; a dash
    where there is no number."""
    shown = arms_table(record, brief=True)
    parts = [format_table(shown.head, shown.rows)]
    if record.verdict is not None:
        parts.append(f"verdict: {record.verdict.verdict}")
        parts += [f"  {one.outcome}: {one.says}" for one in record.verdict.checks]
    parts += [f"not run: {label} ({why})" for label, why in record.not_run.items()]
    for about, table in (
        (about_versus(record), versus_table(record)),
        (about_equal(record), equal_table(record)),
        (about_reach(record), reach_table(record)),
        (about_bins(record), bins_table(record)),
        (about_splits(record), splits_table(record)),
        ("Answers without a model", _baselines_in_brief(record)),
    ):
        if table is not None:
            parts += ["", about, "", format_table(table.head, table.rows)]
    return "\n".join(parts)


def arms_table(record: Record, brief: bool = False) -> TableText:
    """A row for each arm: validation and test values of all metrics beside the paper's.

    brief: validation values only beside the paper's.
    """
    first = record.metrics[0]
    told = {name for arm in record.arms.values() for name in arm.paper}
    parts = {m.name: _parts(m.name in told, brief) for m in record.metrics}
    written = _written(record)
    parts |= {metric.name: [] for metric in written if not _has(record, metric, "test")}
    head = ["arm", "status", "seeds", "steps", "seconds"]
    for metric in record.metrics:
        head += [f"{_title(metric)}: {part}" for part in parts[metric.name]]
    more = [source for source in sources_of(record) if source in COLUMNS]
    level = "" if _is_resampled(record) else "95 % "
    head += [f"{level}interval of test {_title(first)}"]
    head += [COLUMNS[source].format(_title(first)) for source in more]
    head += [COLUMNS["generated"].format(_title(metric)) for metric in written]
    rows = [_arm_row(record, label, parts, more, written) for label in record.arms]
    return TableText(head, rows)


def _written(record: Record) -> list[MetricSpec]:
    """Further metrics of generated answers, where one of them is of nothing else: those of text
    that a model writes."""
    found = [metric for metric in record.metrics[1:] if _has(record, metric, "generated")]
    alone = [metric for metric in found if not _has(record, metric, "test")]
    return found if alone else []


def _has(record: Record, metric: MetricSpec, source: Source) -> bool:
    """Whether a run has values of a metric."""
    arms = record.arms.values()
    return any(values_of(record, arm, metric.name, source) for arm in arms)


def _is_resampled(record: Record) -> bool:
    """Whether some interval is a bootstrap's, which has a level of its own and says so."""
    tests = [run.test for arm in record.arms.values() for run in arm.runs]
    return any(test is not None and test.bootstrap is not None for test in tests)


def _title(metric: MetricSpec) -> str:
    return metric.name.replace("_", " ")


def _parts(told: bool, brief: bool) -> list[str]:
    """Columns of a metric; none for a paper that says nothing about it."""
    if told:
        return ["paper", "validation", "test"]
    return ["test"] if brief else ["validation", "test"]


def _arm_row(
    record: Record,
    label: str,
    parts: dict[str, list[str]],
    more: list[Source],
    written: list[MetricSpec],
) -> list[str]:
    arm, first = record.arms[label], record.metrics[0]
    row = [label, status(arm), str(len(arm.runs))]
    row += [span([run.steps for run in arm.runs]), span([round(r.seconds) for r in arm.runs])]
    for metric in record.metrics:
        paper = arm.paper.get(metric.name)
        texts = {
            "paper": NONE if paper is None else f"{paper.value:.4g}",
            "validation": mean_text(best(arm, metric.name), metric),
            "test": mean_text(estimate(record, arm, metric.name), metric),
        }
        row += [texts[part] for part in parts[metric.name]]
    row.append(interval_text(estimate(record, arm, first.name), first))
    row += [mean_text(estimate(record, arm, first.name, s), first) for s in more]
    return row + [mean_text(estimate(record, arm, m.name, "generated"), m) for m in written]


def span(values: list[int]) -> str:
    """The least and the most, if they differ."""
    if not values:
        return NONE
    return " to ".join(f"{value:,}" for value in sorted({min(values), max(values)}))


def mean_text(found: Estimate | None, metric: MetricSpec) -> str:
    return NONE if found is None else number(found.mean, metric)


def interval_text(found: Estimate | None, metric: MetricSpec) -> str:
    """An interval and what it is over."""
    if found is None or found.interval is None:
        return NONE if found is None else found.basis
    low, high = (number(end, metric) for end in found.interval)
    return f"{low} to {high}, {found.basis}"


def number(value: float, metric: MetricSpec) -> str:
    """A value of a metric; 0 and 1 without decimals where they are exact."""
    if value in (0, 1):
        return f"{value:.0f}"
    if metric.better == "higher" and abs(value) <= 1:
        return f"{value:.4f}"
    return f"{value:#.4g}"


def grid_table(record: Record) -> TableText | None:
    """The arms as the record's table arranges them, the test value of each metric in a cell; None
    where it asks for a row per arm."""
    if record.table is None or not record.table.rows:
        return None
    rows = _grouped(record, record.table.rows)
    if not _is_factors(record, record.table.columns):
        return None
    columns = list(_grouped(record, record.table.columns))
    metrics = [record.metric(name) for name in _cells(record)]
    body = []
    for row, arms in rows.items():
        cells = []
        for column in columns:
            mine = [a for a in arms if _values(a, record.table.columns) == column]
            cells.append("; ".join(_cell(record, arm, metrics) for arm in mine) or NONE)
        body.append([_in_words(record.table.rows, row), *cells])
    head = [_in_words(record.table.columns, column) for column in columns]
    return TableText(["", *head], body)


def _cells(record: Record) -> Sequence[str]:
    named = record.table.cells if record.table is not None else ()
    return named or (record.metrics[0].name,)


def _is_factors(record: Record, names: Sequence[str]) -> bool:
    return all(any(name in arm.factors for arm in record.arms.values()) for name in names)


def _grouped(record: Record, names: Sequence[str]) -> dict[tuple[Factor, ...], list[ArmRecord]]:
    """Arms by their values of these factors."""
    found: dict[tuple[Factor, ...], list[ArmRecord]] = {}
    for arm in record.arms.values():
        found.setdefault(_values(arm, names), []).append(arm)
    return found


def _values(arm: ArmRecord, names: Sequence[str]) -> tuple[Factor, ...]:
    return tuple(arm.factors.get(name, "") for name in names)


def _in_words(names: Sequence[str], values: tuple[Factor, ...]) -> str:
    found = []
    for name, value in zip(names, values, strict=True):
        text = f"{value:g}" if isinstance(value, float) else str(value)
        found.append(text if isinstance(value, str) else f"{name.replace('_', ' ')} {text}")
    return ", ".join(found)


def _cell(record: Record, arm: ArmRecord, metrics: list[MetricSpec]) -> str:
    """ "0.851 (0.835 to 0.866), token accuracy 0.978"."""
    first, *others = metrics
    found = estimate(record, arm, first.name)
    if found is None:
        return status(arm)
    text = _with_interval(found, first)
    for metric in others:
        text += f", {_title(metric)} {mean_text(estimate(record, arm, metric.name), metric)}"
    done = status(arm)
    return text if done == "done" else f"{text}, {done}"


def slice_tables(record: Record) -> dict[str, TableText]:
    """For each metric, slice of few bins and source, "exact match by digits, last checkpoint": arms
    by bins, each with the authors' values below it. None where the recipe has a grid of its own."""
    found: dict[str, TableText] = {}
    if record.table is not None and record.table.rows:
        return found
    for metric in record.metrics:
        for by in metric.slices:
            for source in sources_of(record):
                shown = _slice_table(record, metric, by, source)
                if shown is not None:
                    which = "" if source == "test" else f", {source_label(record, source)}"
                    found[f"{_title(metric)} by {by}{which}"] = shown
    return found


def _slice_table(record: Record, metric: MetricSpec, by: str, source: Source) -> TableText | None:
    """None without values of ours, or with too many bins."""
    rows: list[tuple[str, dict[str, float]]] = []
    ours = 0
    for label, arm in record.arms.items():
        found = sliced(record, arm, metric.name, by, source)
        ours += len(found)
        rows.append((label, {key: one.mean for key, one in found.items()}))
        rows.append((f"authors, {label}", authors_values(arm, metric.name, by, source)))
    keys = sorted(dict.fromkeys(key for _, cells in rows for key in cells), key=_in_order)
    if not ours or len(keys) > MOST_BINS:
        return None
    body = [
        [label, *(number(cells[key], metric) if key in cells else NONE for key in keys)]
        for label, cells in rows
        if cells
    ]
    return TableText(["arm", *keys], body)


def splits_table(record: Record) -> TableText | None:
    """The first metric of each arm and of each baseline on the test and on every further split, a
    row for each split; None where no arm was tested on one."""
    splits, first = splits_of(record.arms.values()), record.metrics[0]
    if not splits:
        return None
    sources: list[Source] = ["test", *(SPLIT + split for split in splits)]
    named = {}
    for source in sources:
        found = {label: estimate(record, arm, first.name, source) for label, arm in _tested(record)}
        cells = {label: _with_interval(one, first) for label, one in found.items()}
        for name, totals in baselines_of(record, record.arms.values(), source).items():
            sums = totals.all.get(first.name)
            cells[name] = number(totals.value(first.name), first) if sums and sums.w else NONE
        named[source.removeprefix(SPLIT)] = cells
    columns = list(dict.fromkeys(name for cells in named.values() for name in cells))
    rows = [[split, *(cells.get(c, NONE) for c in columns)] for split, cells in named.items()]
    return TableText(["split", *columns], rows)


def _tested(record: Record) -> list[tuple[str, ArmRecord]]:
    return [(label, arm) for label, arm in record.arms.items() if splits_of([arm])]


def _with_interval(found: Estimate | None, metric: MetricSpec) -> str:
    """ "0.851 (0.835 to 0.866)"."""
    if found is None:
        return NONE
    text = number(found.mean, metric)
    if found.interval is not None:
        low, high = (number(end, metric) for end in found.interval)
        text += f" ({low} to {high})"
    return text


def about_splits(record: Record) -> str:
    text = f"Test {_title(record.metrics[0])} on further splits, with intervals as above"
    if PERMUTED in splits_of(record.arms.values()):
        text += f"; {PERMUTED}: {source_label(record, SPLIT + PERMUTED)}, in the same units"
    return text


def reach_table(record: Record) -> TableText | None:
    """Steps and seconds of each arm up to the validation values that the record's table names; None
    without arms that have run."""
    values = record.table.reach if record.table is not None else ()
    arms = {label: arm for label, arm in record.arms.items() if arm.runs}
    if not values or not arms:
        return None
    metric = record.metric(_cells(record)[0])
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
    metric = record.metric(_cells(record)[0])
    return f"Training up to the first evaluation with this validation {_title(metric)}"


def bins_table(record: Record) -> TableText | None:
    """The bins that the record's table names: a row for each arm and, after the arms of a task, for
    each of its baselines. With `excess_over` only arms, less that baseline. None without values."""
    spec = record.table
    if spec is None or not spec.by:
        return None
    metric = record.metric(_cells(record)[0])
    rows = []
    for labels in _same_baselines(record):
        arms = {label: record.arms[label] for label in labels}
        baselines = baselines_of(record, arms.values())
        known = {name: one.sliced(metric.name, spec.by) for name, one in baselines.items()}
        if spec.excess_over and spec.excess_over not in known:
            continue
        less = known.get(spec.excess_over, {})
        for label, arm in arms.items():
            bins = sliced(record, arm, metric.name, spec.by)
            cells = [_less(bins.get(key), less.get(key), metric, spec) for key in spec.bins]
            rows.append([label, *cells])
        group = _group(record, labels)
        for name, values in known.items() if not spec.excess_over else ():
            cells = [number(values[key], metric) if key in values else NONE for key in spec.bins]
            rows.append([f"{name}{group}", *cells])
    if all(cell == NONE for row in rows for cell in row[1:]):
        return None
    return TableText(["arm", *spec.bins], rows)


def about_bins(record: Record) -> str:
    """What that table has."""
    spec = record.table
    if spec is None or not spec.by:
        return ""
    text = f"Test {_title(record.metric(_cells(record)[0]))} by {spec.by.replace('_', ' ')}"
    if spec.excess_over:
        text += f", above that of {spec.excess_over} on the same sequences"
    return text


def _less(found: Estimate | None, baseline: float | None, metric: MetricSpec, spec: Table) -> str:
    """An estimate, less a baseline where the table asks for that."""
    if found is None or (spec.excess_over and baseline is None):
        return NONE
    if not spec.excess_over or baseline is None:
        return _with_interval(found, metric)
    ends = None if found.interval is None else [end - baseline for end in found.interval]
    moved = found.model_copy(update={"mean": found.mean - baseline, "interval": ends})
    return _with_interval(moved, metric)


def _same_baselines(record: Record) -> list[list[str]]:
    """Labels of the arms that ran, by their task."""
    groups: list[tuple[object, list[str]]] = []
    for label, arm in record.arms.items():
        for run in arm.runs[:1]:
            task = run.config["task"]
            mine = next((labels for other, labels in groups if other == task), None)
            if mine is None:
                groups.append((task, [label]))
            else:
                mine.append(label)
    return [labels for _, labels in groups]


def _group(record: Record, labels: list[str]) -> str:
    """The factors that these arms have and no other: " (linear)"; the first label where there are
    none, and nothing where they are all arms."""
    others = [arm for label, arm in record.arms.items() if label not in labels]
    own = [
        _in_words([name], (value,))
        for name, value in record.arms[labels[0]].factors.items()
        if all(record.arms[label].factors.get(name) == value for label in labels)
        and all(arm.factors.get(name) != value for arm in others)
    ]
    return f" ({', '.join(own or labels[:1])})" if others else ""


def versus_table(record: Record) -> TableText | None:
    """Arms that differ in the factor `table.versus` alone, and those of `table.pairs`, compared
    over their seeds: a row for each pair and metric. None where the recipe asks for none, or no
    pair has values yet."""
    rows = []
    for label, other in _pairs(record):
        paired = _are_paired(record, label, other)
        for metric in map(record.metric, _cells(record)):
            ours, theirs = (
                values_of(record, record.arms[one], metric.name) for one in (label, other)
            )
            if ours and theirs:
                compared = _compared(ours, theirs, metric, paired and len(ours) == len(theirs))
                rows.append([label, other, _title(metric), *compared])
    if not rows:
        return None
    head = ["arm", "against", "metric", "mean, sd, n", "mean, sd, n of the other"]
    return TableText([*head, "difference", "95 % interval", "p"], rows)


def equal_table(record: Record) -> TableText | None:
    """The same pairs at as much training as both have had: the validation values of the first
    metric of the cells at equal sequences, FLOPs and seconds. None where the recipe draws no curves
    against FLOPs, or no pair has any."""
    rows = []
    metric = record.metric(_cells(record)[0])
    drawn = {figure.x for figure in record.figures if figure.kind == "curves"}
    for label, other in _pairs(record) if "flops" in drawn else ():
        for axis in EQUAL:
            arms = [record.arms[label], record.arms[other]]
            most = _most(arms, axis)
            if most is not None:
                found = [values_within(arm, metric.name, axis, most) for arm in arms]
                cells = [_spread(v, metric) if v else NONE for v in found]
                rows.append([label, other, EQUAL[axis].format(most), *cells])
    if not rows:
        return None
    return TableText(
        ["arm", "against", "at equal", "mean, sd, n", "mean, sd, n of the other"], rows
    )


EQUAL = {"sequences": "{:,.0f} sequences", "flops": "{:.3g} FLOPs", "seconds": "{:,.0f} seconds"}
"""What may be made equal, in words."""


def _most(arms: list[ArmRecord], axis: str) -> float | None:
    """As much training as every run of these arms has had; None if that is not known of all."""
    ends = [at_axis(run.curve[-1], axis) for arm in arms for run in arm.runs]
    if not all(arm.runs for arm in arms) or None in ends:
        return None
    return min(end for end in ends if end is not None)


def about_equal(record: Record) -> str:
    metric = _title(record.metric(_cells(record)[0]))
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


def _pairs(record: Record) -> Iterator[tuple[str, str]]:
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


def _are_paired(record: Record, label: str, other: str) -> bool:
    """Whether runs of one seed are compared with each other."""
    seeds = [[run.seed for run in record.arms[one].runs] for one in (label, other)]
    return record.table is not None and record.table.paired and seeds[0] == seeds[1]


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


def _compared(
    ours: list[float], theirs: list[float], metric: MetricSpec, paired: bool
) -> list[str]:
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


def _in_order(key: str) -> tuple[bool, float, str]:
    """Numbers by size, then texts."""
    try:
        return False, float(key), ""
    except ValueError:
        return True, 0.0, key


def seeds_table(record: Record) -> TableText | None:
    """What each seed has on test sequences, for arms of several; None without such arms."""
    first = record.metrics[0]
    there = sources_of(record)
    shown: list[Source] = ["test", "generated", *(s for s in there if s in ("last", "best"))]
    rows = []
    for label, arm in record.arms.items():
        for run in arm.runs if len(arm.runs) > 1 else []:
            tested = run_totals(record, run)
            values = [
                NONE
                if totals is None or first.name not in totals.all
                else number(totals.value(first.name), first)
                for totals in (run_totals(record, run, source) for source in shown)
            ]
            n = NONE if tested is None else f"{tested.sequences:,}"
            rows.append([label, str(run.seed), *values, n, f"{run.seconds:.0f}"])
    named = [COLUMNS.get(source, "test {}").format(_title(first)) for source in shown]
    head = ["arm", "seed", *named, "test sequences", "seconds"]
    return TableText(head, rows) if rows else None


def baselines_table(record: Record) -> TableText | None:
    """Test values of answers without a model; arms with the same ones share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for label, arm in record.arms.items():
        for name, totals in _baselines(record, arm).items():
            cells = [
                number(totals.value(m.name), m)
                if m.name in totals.all and totals.all[m.name].w
                else NONE
                for m in record.metrics
            ]
            rows.setdefault((name, *cells), []).append(label)
    head = ["baseline", *(_title(metric) for metric in record.metrics), "arms"]
    if not rows:
        return None
    return TableText(head, [[*row, "; ".join(arms)] for row, arms in rows.items()])


def _baselines_in_brief(record: Record) -> TableText | None:
    """That table where no other has the baselines."""
    shown = bins_table(record) is not None or splits_table(record) is not None
    return None if shown else baselines_table(record)


def _baselines(record: Record, arm: ArmRecord) -> Baselines:
    """Those of the record, or of an arm's first run in files from before it had some."""
    tests = [run.test for run in arm.runs[:1] if run.test is not None]
    own = {name: data for test in tests for name, data in test.baselines.items()}
    found = {name: data.totals(record.metrics) for name, data in own.items()}
    return found | baselines_of(record, [arm])


def markdown_table(table: TableText) -> list[str]:
    """Lines of Markdown, every text escaped."""
    lines = [_line(table.head), _line(["---"] * len(table.head))]
    return lines + [_line(row) for row in table.rows]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell if cell == '---' else escape(cell) for cell in cells)} |"


def escape(text: str) -> str:
    """A text that Markdown and HTML show as it is, on one line."""
    flat = " ".join(text.split())
    marked = re.sub(r"([\\`*_\[\]|#~!$])", r"\\\1", flat)
    return html.escape(marked, quote=False)
