"""Tables of a record, for the terminal and for Markdown pages.

A table is a head and rows of plain texts; `format_table` prints it, `markdown_table` escapes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from entp.report.cells import (
    NONE,
    TableText,
    cell_names,
    in_order,
    in_words,
    interval_text,
    mean_text,
    number,
    span,
    title,
    with_interval,
)
from entp.report.comparisons import (
    about_equal,
    about_reach,
    about_versus,
    equal_table,
    reach_table,
    versus_table,
)
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
    values_of,
)
from entp.terminal import format_table

MOST_BINS = 20
"""Bins of a slice that a table shows; of more, only the figure tells."""
COLUMNS: dict[Source, str] = {
    "generated": "generated {}",
    "last": "last checkpoint's {}",
    "best": "best {} on the test itself",
}
"""The columns of sources besides the best checkpoint."""


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
        head += [f"{title(metric)}: {part}" for part in parts[metric.name]]
    more = [source for source in sources_of(record) if source in COLUMNS]
    level = "" if _is_resampled(record) else "95 % "
    head += [f"{level}interval of test {title(first)}"]
    head += [COLUMNS[source].format(title(first)) for source in more]
    head += [COLUMNS["generated"].format(title(metric)) for metric in written]
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


def grid_table(record: Record) -> TableText | None:
    """The arms as the record's table arranges them, the test value of each metric in a cell; None
    where it asks for a row per arm."""
    if record.table is None or not record.table.rows:
        return None
    rows = _grouped(record, record.table.rows)
    if not _is_factors(record, record.table.columns):
        return None
    columns = list(_grouped(record, record.table.columns))
    metrics = [record.metric(name) for name in cell_names(record)]
    body = []
    for row, arms in rows.items():
        cells = []
        for column in columns:
            mine = [a for a in arms if _values(a, record.table.columns) == column]
            cells.append("; ".join(_cell(record, arm, metrics) for arm in mine) or NONE)
        body.append([in_words(record.table.rows, row), *cells])
    head = [in_words(record.table.columns, column) for column in columns]
    return TableText(["", *head], body)


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


def _cell(record: Record, arm: ArmRecord, metrics: list[MetricSpec]) -> str:
    """ "0.851 (0.835 to 0.866), token accuracy 0.978"."""
    first, *others = metrics
    found = estimate(record, arm, first.name)
    if found is None:
        return status(arm)
    text = with_interval(found, first)
    for metric in others:
        text += f", {title(metric)} {mean_text(estimate(record, arm, metric.name), metric)}"
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
                    found[f"{title(metric)} by {by}{which}"] = shown
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
    keys = sorted(dict.fromkeys(key for _, cells in rows for key in cells), key=in_order)
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
        cells = {label: with_interval(one, first) for label, one in found.items()}
        for name, totals in baselines_of(record, record.arms.values(), source).items():
            sums = totals.all.get(first.name)
            cells[name] = number(totals.value(first.name), first) if sums and sums.w else NONE
        named[source.removeprefix(SPLIT)] = cells
    columns = list(dict.fromkeys(name for cells in named.values() for name in cells))
    rows = [[split, *(cells.get(c, NONE) for c in columns)] for split, cells in named.items()]
    return TableText(["split", *columns], rows)


def _tested(record: Record) -> list[tuple[str, ArmRecord]]:
    return [(label, arm) for label, arm in record.arms.items() if splits_of([arm])]


def about_splits(record: Record) -> str:
    text = f"Test {title(record.metrics[0])} on further splits, with intervals as above"
    if PERMUTED in splits_of(record.arms.values()):
        text += f"; {PERMUTED}: {source_label(record, SPLIT + PERMUTED)}, in the same units"
    return text


def bins_table(record: Record) -> TableText | None:
    """The bins that the record's table names: a row for each arm and, after the arms of a task, for
    each of its baselines. With `excess_over` only arms, less that baseline. None without values."""
    spec = record.table
    if spec is None or not spec.by:
        return None
    metric = record.metric(cell_names(record)[0])
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
    text = f"Test {title(record.metric(cell_names(record)[0]))} by {spec.by.replace('_', ' ')}"
    if spec.excess_over:
        text += f", above that of {spec.excess_over} on the same sequences"
    return text


def _less(found: Estimate | None, baseline: float | None, metric: MetricSpec, spec: Table) -> str:
    """An estimate, less a baseline where the table asks for that."""
    if found is None or (spec.excess_over and baseline is None):
        return NONE
    if not spec.excess_over or baseline is None:
        return with_interval(found, metric)
    ends = None if found.interval is None else [end - baseline for end in found.interval]
    moved = found.model_copy(update={"mean": found.mean - baseline, "interval": ends})
    return with_interval(moved, metric)


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
        in_words([name], (value,))
        for name, value in record.arms[labels[0]].factors.items()
        if all(record.arms[label].factors.get(name) == value for label in labels)
        and all(arm.factors.get(name) != value for arm in others)
    ]
    return f" ({', '.join(own or labels[:1])})" if others else ""


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
    named = [COLUMNS.get(source, "test {}").format(title(first)) for source in shown]
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
    head = ["baseline", *(title(metric) for metric in record.metrics), "arms"]
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
